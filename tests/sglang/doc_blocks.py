"""Tables in docs/compatibility.md that are made by a script."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def block(name: str) -> str:
    """What stands between the marks of ``name``."""
    start, end = _marks(name)
    text = PAGE.read_text()
    return text[text.index(start) + len(start) : text.index(end)].strip()


def write_block(name: str, content: str) -> None:
    start, end = _marks(name)
    text = PAGE.read_text()
    before, after = text[: text.index(start) + len(start)], text[text.index(end) :]
    PAGE.write_text(f"{before}\n{content}\n{after}")


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: made, do not edit -->", f"<!-- end of {name} -->"
