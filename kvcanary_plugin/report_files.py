"""Report files: JSON lines in one directory of limited size, readable by their owner only."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, TextIO

_PATTERN: Final = "kvcanary-*.jsonl"
# A directory holds this many files at its limit, so that removing the oldest loses an eighth.
_FILES_AT_LIMIT: Final = 8


class ReportFiles:
    """Appends reports as JSON lines; starts a new file and removes the oldest as the size grows.

    Several processes may share the directory; the limit counts the files of all of them.

    Args:
        directory: created if it is not there, for its owner only.
        max_bytes: limit over all report files in the directory.
        name: part of the file names that tells this process apart (engine and ranks).

    Raises:
        ValueError: the directory cannot be created or written to.
    """

    def __init__(self, directory: Path, *, max_bytes: int, name: str) -> None:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            writable = os.access(directory, os.W_OK | os.X_OK)
        except OSError as error:
            raise ValueError(
                f"kvcanary: report.directory got {directory} ({error.strerror}); allowed: a"
                " directory that can be created and written to; choose another or correct its mode"
            ) from error
        if not writable:
            raise ValueError(
                f"kvcanary: report.directory got {directory}; allowed: a directory that can be"
                " written to; choose another or correct its mode"
            )
        self._directory = directory
        self._max_bytes = max_bytes
        self._file_bytes = max_bytes // _FILES_AT_LIMIT
        self._name = name
        self._file: TextIO | None = None

    @property
    def max_line_bytes(self) -> int:
        """A longer line would not fit into a file, and would push the directory over its limit."""
        return self._file_bytes

    def append(self, reports: Iterable[dict[str, Any]]) -> None:
        """Writes each report as one line; OSError when the disk refuses."""
        for report in reports:
            line = json.dumps(report) + "\n"
            if self._file is None or self._file.tell() + len(line) > self._file_bytes:
                self._start_file()
            assert self._file is not None
            self._file.write(line)
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Closes the file that is being written."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _start_file(self) -> None:
        self.close()
        self._remove_oldest()
        stamp = f"{time.time_ns():020d}"
        path = self._directory / f"kvcanary-{self._name}-{os.getpid()}-{stamp}.jsonl"
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        self._file = os.fdopen(descriptor, "a", encoding="utf-8")

    def _remove_oldest(self) -> None:
        """Makes room for one whole file below the limit."""
        files = []
        for path in self._directory.glob(_PATTERN):
            try:
                status = path.stat()
            except FileNotFoundError:  # another process removed it
                continue
            files.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total + self._file_bytes <= self._max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size
