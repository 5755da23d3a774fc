"""The forwards of the window as a picture: who took part, and who touched the slot."""

from __future__ import annotations

from typing import Final

from kvcanary_plugin.incident_file import Evidence, Forward, Place
from kvcanary_plugin.report_page.html import Html, element, join

_LEFT: Final = 130
_TOP: Final = 22
_LANE: Final = 30
_NARROWEST: Final = 13
_WIDEST: Final = 46
_WIDTH: Final = 900


def timeline(evidence: Evidence, root: Place) -> Html:
    """An SVG with a column for each forward and lanes for the requests and the slot."""
    window = evidence.window
    if not window:
        return element("p", "The flight recorder held no forward.", class_="soft")
    column = max(_NARROWEST, min(_WIDEST, (_WIDTH - _LEFT) // len(window)))
    lanes = ["forward", "request", f"slot {root.slot}"]
    width, height = _LEFT + column * len(window) + 60, _TOP + _LANE * len(lanes) + 24
    marks = []
    for index, forward in enumerate(window):
        x = _LEFT + column * index + column // 2
        marks += _column(forward, root, x, column, height)
    picture = element(
        "svg",
        element("title", f"Forwards {window[0].step} to {window[-1].step}"),
        *(_lane(name, number, width) for number, name in enumerate(lanes)),
        *marks,
        *_axis(evidence, root, column, height),
        class_="timeline",
        width=width,
        height=height,
        viewBox=f"0 0 {width} {height}",
        role="img",
    )
    left_out = (
        element("p", f"{evidence.left_out} forwards before it were left out: size.", class_="soft")
        if evidence.left_out
        else None
    )
    return join(element("div", picture, class_="scroll"), _legend(), left_out)


def _lane(name: str, number: int, width: int) -> Html:
    y = _TOP + _LANE * number + _LANE // 2
    return join(
        element("line", x1=_LEFT, x2=width, y1=y, y2=y, class_="rule"),
        element("text", name, x=0, y=y + 4),
    )


def _column(forward: Forward, root: Place, x: int, column: int, height: int) -> list[Html]:
    marks = []
    if forward.step == root.step:
        marks.append(
            element(
                "rect",
                x=x - column // 2,
                y=_TOP - 16,
                width=column,
                height=height - _TOP - 4,
                rx=4,
                class_="incident",
            )
        )
    about = f"step {forward.step}, {forward.kind}: {forward.requests} requests,"
    marks.append(
        element(
            "rect",
            element("title", f"{about} {forward.tokens} tokens"),
            x=x - 4,
            y=_TOP + _LANE // 2 - 4,
            width=8,
            height=8,
            class_="forward",
        )
    )
    for part in forward.parts:
        kind = "reader" if part.uid == root.request_uid else "writer"
        if kind == "reader":
            text = f"step {forward.step}: reads {part.prefix_len} slots, writes {part.extend_len}"
            marks.append(_dot(x, 1, kind, text, hollow=False))
        if root.slot in part.slots[root.group]:
            writer = "the request that was hit" if kind == "reader" else f"request #{part.uid}"
            text = f"step {forward.step}: written by {writer}"
            marks.append(_dot(x, 2, kind, text, hollow=False))
        elif kind == "reader" and forward.step == root.step and root.phase != "write":
            marks.append(_dot(x, 2, kind, f"step {forward.step}: read", hollow=True))
    return marks


def _dot(x: int, lane: int, kind: str, text: str, *, hollow: bool) -> Html:
    return element(
        "circle",
        element("title", text),
        cx=x,
        cy=_TOP + _LANE * lane + _LANE // 2,
        r=5,
        class_=f"{kind} hollow" if hollow else kind,
    )


def _axis(evidence: Evidence, root: Place, column: int, height: int) -> list[Html]:
    window = evidence.window
    labels = []
    every = max(1, 60 // column)
    for index, forward in enumerate(window):
        is_root = forward.step == root.step
        far_from_end = len(window) - 1 - index >= every
        if is_root or (index % every == 0 and far_from_end):
            labels.append(
                element(
                    "text",
                    forward.step if not is_root else f"step {forward.step}",
                    x=_LEFT + column * index + column // 2,
                    y=height - 4,
                    text_anchor="middle",
                    class_="now" if is_root else None,
                )
            )
    return labels


def _legend() -> Html:
    return element(
        "div",
        *(
            element("span", element("b", "", class_=kind), text)
            for kind, text in (
                ("reader", "the request that was hit: in the forward, or writing the slot"),
                ("read", "it reads the slot"),
                ("writer", "another request writes the slot"),
            )
        ),
        class_="legend",
    )
