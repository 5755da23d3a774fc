"""The processes of this machine, as /proc shows them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def live_processes() -> Iterator[tuple[int, int, int, str]]:
    """Process, parent, session and command line of every live process."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stat = (entry / "stat").read_text()
            command = (entry / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        state, parent, _, session = stat.rpartition(")")[2].split()[:4]
        if state != "Z":
            yield int(entry.name), int(parent), int(session), command


def session_members(leader: int) -> list[str]:
    """Command lines of the live processes of a session."""
    return [command for _, _, session, command in live_processes() if session == leader]
