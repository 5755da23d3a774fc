"""Dealing with other threads and processes, on a machine that is busy with others as well."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T], what: str = "what is waited for", *, seconds: float = 120.0
) -> T:
    """The first true value of ``condition``; fails when there is none for ``seconds``.

    How long it takes says nothing: the processor may belong to others.
    """
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} has not happened in {seconds:.0f} s"
        time.sleep(0.01)
    return value


def replace_text(path: Path, text: str) -> None:
    """Changes a file that somebody looks at now and then, who never sees a part of the text."""
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
