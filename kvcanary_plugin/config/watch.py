"""Settings that change while the engine serves: the file is looked at, a bad one is refused."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from kvcanary_plugin.config.load import load_config
from kvcanary_plugin.config.model import CanaryConfig
from kvcanary_plugin.config.problems import ConfigError, ConfigProblem
from kvcanary_plugin.config.settings import iter_settings

logger = logging.getLogger(__name__)

ReloadResult = Literal["ok", "refused"]

# What tells two states of a file apart: (mtime in ns, size, inode); None when it is not there.
FileState = tuple[int, int, int] | None


class ConfigWatcher:
    """Holds the settings in force and takes new ones from the file when it changes.

    Only settings that the model declares reloadable may differ. Anything else, a file that does
    not load, and settings that whoever uses them cannot take over, are refused: logged and counted
    once per state of the file, and ``current`` stays. Safe to call from several threads.

    Args:
        path: the file that ``config`` was loaded from.
        config: the settings in force.
        environ: the variables that override the file, as they were when ``config`` was loaded.
        on_result: called with "ok" or "refused" after each reload, for the counter.
        check_interval_seconds: shortest time between two looks at the file.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        path: str | Path,
        config: CanaryConfig,
        environ: Mapping[str, str],
        *,
        on_result: Callable[[ReloadResult], None],
        check_interval_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = Path(path)
        self._environ = dict(environ)
        self._on_result = on_result
        self._check_interval_seconds = check_interval_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._current = config
        self._next_check = clock()
        self._file_state = self._look()

    @property
    def current(self) -> CanaryConfig:
        """The settings in force."""
        return self._current

    def poll(self, take_over: Callable[[CanaryConfig], None]) -> None:
        """If the file has changed, hand its settings to ``take_over``; cheap if it has not.

        What ``take_over`` raises refuses the settings, and is raised; it leaves things as they were
        then. Never raises :class:`ConfigError`.
        """
        with self._lock:
            now = self._clock()
            if now < self._next_check:
                return
            self._next_check = now + self._check_interval_seconds
            state = self._look()
            if state == self._file_state:
                return
            self._file_state = state
            self._reload(take_over)

    def _reload(self, take_over: Callable[[CanaryConfig], None]) -> None:
        try:
            config = load_config(self._path, self._environ)
            _refuse_fixed_changes(self._current, config, self._path)
        except ConfigError as error:
            self._refuse("; and ".join(str(problem) for problem in error.problems))
            return
        changes = _changes(self._current, config)
        if changes:
            try:
                take_over(config)
            except Exception as error:
                self._refuse(f"{', '.join(changes)}: {type(error).__name__}: {error}")
                raise
        self._current = config
        logger.info(
            "kvcanary: %s was taken over: %s", self._path, ", ".join(changes) or "nothing changed"
        )
        self._on_result("ok")

    def _refuse(self, reason: str) -> None:
        # One line: who looks for "kvcanary:" in the log sees every field.
        logger.error(
            "kvcanary: %s was not taken over, the settings in force stay: %s",
            self._path,
            " ".join(reason.split()),
        )
        self._on_result("refused")

    def _look(self) -> FileState:
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


def _refuse_fixed_changes(old: CanaryConfig, new: CanaryConfig, file: Path) -> None:
    problems = [
        ConfigProblem(
            field=setting.name,
            value=_as_text(new, setting.path),
            allowed=f"{_as_text(old, setting.path)} until the next start",
            do="restart the engine to change it, or set it back",
            where=str(file),
        )
        for setting in iter_settings()
        if not setting.reloadable and _value(old, setting.path) != _value(new, setting.path)
    ]
    if problems:
        raise ConfigError(problems)


def _changes(old: CanaryConfig, new: CanaryConfig) -> list[str]:
    """What the new settings change, as "name old -> new"."""
    return [
        f"{setting.name} {_as_text(old, setting.path)} -> {_as_text(new, setting.path)}"
        for setting in iter_settings()
        if _value(old, setting.path) != _value(new, setting.path)
    ]


def _as_text(config: CanaryConfig, path: tuple[str, ...]) -> str:
    """A value in the words of the file."""
    value = _value(config, path)
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value(config: CanaryConfig, path: tuple[str, ...]) -> object:
    value: object = config
    for name in path:
        value = getattr(value, name)
    return value
