"""HTML that is escaped unless it was made here."""

from __future__ import annotations

from html import escape
from typing import Final

_VOID: Final = frozenset({"meta", "line", "rect", "circle", "path"})


class Html(str):
    """Markup: put into a page as it is. Any other text is escaped on its way."""

    __slots__ = ()


def element(name: str, /, *children: str | int | None, **attributes: str | int | None) -> Html:
    """An element; children that are no :class:`Html` are escaped, None is left out.

    A trailing underscore of an attribute is dropped (``class_``), others become hyphens.
    """
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID and not children:
        return Html(f"<{name}{shown}/>")
    return Html(f"<{name}{shown}>{join(*children)}</{name}>")


def join(*children: str | int | None) -> Html:
    """Children one behind the other."""
    return Html(
        "".join(
            child if isinstance(child, Html) else escape(str(child))
            for child in children
            if child is not None
        )
    )
