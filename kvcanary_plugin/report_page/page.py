"""The page: a list of incidents, then each of them from its cause to what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from importlib.resources import files

from kvcanary_plugin import __version__
from kvcanary_plugin.checks import check_named
from kvcanary_plugin.incident_file import Incident, IncidentEnd, Place, Request
from kvcanary_plugin.replay import slot_history
from kvcanary_plugin.report_page.html import Html, element, join
from kvcanary_plugin.report_page.slots import slots_around
from kvcanary_plugin.report_page.timeline import timeline

# Nothing is loaded, nothing runs: whatever a request id contains, it stays text.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render_page(
    incidents: Sequence[Incident],
    ends: Mapping[str, IncidentEnd],
    *,
    source: str,
    runbook: str,
) -> str:
    """The page as text.

    Args:
        incidents: oldest first.
        ends: what became of them, by id.
        source: where they were read from, for the heading and the commands.
        runbook: where the links to the runbook lead.
    """
    body = join(
        element("h1", "KV cache incidents"),
        element("p", _summary(incidents, ends), f" Read from {source}.", class_="soft"),
        _contents(incidents) if len(incidents) > 1 else None,
        *(_incident(incident, ends.get(incident.id), source, runbook) for incident in incidents),
        element("p", f"Made by kvcanary {__version__}.", class_="soft"),
    )
    head = join(
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("title", f"kvcanary: {_plural(len(incidents), 'incident')}"),
        element("style", Html(_style())),
    )
    html = element("html", element("head", head), element("body", body), lang="en")
    return f"<!doctype html>\n{html}\n"


@lru_cache(maxsize=1)
def _style() -> str:
    return files("kvcanary_plugin.report_page").joinpath("style.css").read_text("utf-8")


def _summary(incidents: Sequence[Incident], ends: Mapping[str, IncidentEnd]) -> str:
    if not incidents:
        return "No incident."
    rows = sum(
        ends[incident.id].rows if incident.id in ends else incident.rows for incident in incidents
    )
    first, last = _time(incidents[0].time), _time(incidents[-1].time)
    when = f"at {first}" if first == last else f"from {first} to {last}"
    return f"{_plural(len(incidents), 'incident')}, {_plural(rows, 'violation')}, {when}."


def _contents(incidents: Sequence[Incident]) -> Html:
    rows = [
        element(
            "tr",
            element("td", _time(incident.time), class_="time"),
            element("td", element("a", incident.id, href=f"#{incident.id}")),
            element("td", " + ".join(incident.root.checks)),
            element("td", incident.cause),
        )
        for incident in incidents
    ]
    head = element("tr", *(element("th", name) for name in ("time", "incident", "check", "cause")))
    return element("div", element("table", head, *rows), class_="card scroll")


# ---- one incident --------------------------------------------------------------------------------


def _incident(incident: Incident, end: IncidentEnd | None, source: str, runbook: str) -> Html:
    evidence, root = incident.evidence, incident.root
    return element(
        "section",
        element(
            "div",
            element("h2", f"Incident {incident.id}"),
            *(element("span", label, class_="check") for label in root.checks),
            element("time", _time(incident.time)),
            class_="head",
        ),
        element("p", f"{incident.cause[0].upper()}{incident.cause[1:]}.", class_="cause"),
        _facts(_root_facts(incident, end)),
        element("p", f"No evidence: {incident.no_evidence_because}.", class_="note")
        if evidence is None
        else join(
            element("h3", "Time line"),
            timeline(evidence, root),
            _history(slot_history(evidence, root)),
            element("h3", f"Slots around position {root.read_position}"),
            slots_around(evidence, root),
            element("h3", "Requests"),
            element("div", *(_request(r, root) for r in evidence.requests), class_="requests")
            if evidence.requests
            else element("p", "No request of the recorded forwards is involved.", class_="soft"),
        ),
        element("h3", "What followed from it"),
        _followed(incident, end),
        element("h3", "What to do next"),
        *(_advice(label, runbook) for label in root.checks),
        element(
            "p",
            "Run it once more, on any machine: ",
            element("code", f"kvcanary replay {source} --incident {incident.id}"),
        ),
        class_="card",
        id=incident.id,
    )


def _root_facts(incident: Incident, end: IncidentEnd | None) -> list[tuple[str, str]]:
    root = incident.root
    position = str(root.position)
    if {"unwritten", "out_of_pool"} & set(root.checks):
        position = str(root.read_position)
    elif root.expected_position not in (None, root.position):
        position = f"holds {root.position}, read as {root.expected_position}"
        if root.phase == "write":
            position = f"{root.position} written, {root.expected_position} expected"
    writer = _name(root.writer_id, root.writer_uid)
    if root.writer_step is not None:
        writer += f", step {root.writer_step}"
    return [
        ("slot", f"{root.slot} (group {root.group})"),
        ("position", position),
        ("seen in", f"step {root.step}, {root.phase}"),
        ("request", _name(root.request_id, root.request_uid)),
        ("last written by", writer),
        ("slot state", root.slot_state or "not tracked"),
        ("violations", str(end.rows if end is not None else incident.rows)),
        ("engine", incident.engine or "not known"),
    ]


def _facts(facts: list[tuple[str, str]]) -> Html:
    pairs = (element("div", element("dt", name), element("dd", value)) for name, value in facts)
    return element("dl", *pairs, class_="facts")


def _history(history: list[str]) -> Html:
    if not history:
        return element("p", "No recorded forward touched the slot.", class_="soft")
    shown = history if len(history) <= 12 else [*history[:4], "...", *history[-7:]]
    return element("ol", *(element("li", line) for line in shown), class_="history")


def _request(request: Request, root: Place) -> Html:
    role = "Reader" if request.role == "reader" else "Last writer"
    row = next((row for row in request.rows if row.group == root.group), None)
    at = root.read_position - request.first
    names = str(row.slots[at]) if row is not None and 0 <= at < len(row.slots) else "none"
    facts = [
        ("role", role),
        ("row in the page table", str(request.request_row)),
        ("tokens before the forward", str(request.prefix_len)),
        ("tokens of the forward", str(request.extend_len)),
        (f"slot at position {root.read_position}", names),
    ]
    return element(
        "div",
        element("h4", f"Request {request.id or f'#{request.uid}'}"),
        _facts(facts),
        class_=f"request {request.role}",
    )


def _followed(incident: Incident, end: IncidentEnd | None) -> Html:
    total = end.rows if end is not None else incident.rows
    parts: list[Html] = []
    if end is not None:
        requests = ", ".join(end.request_ids[:10]) + (" ..." if end.requests > 10 else "")
        checks = ", ".join(f"{label} {count}" for label, count in end.checks.items())
        parts.append(
            element(
                "p",
                f"{_plural(end.rows, 'violation')} in steps {end.first_step} to {end.last_step}"
                f" ({checks}), {_plural(end.requests, 'request')} hit"
                + (f": {requests}." if requests else "."),
            )
        )
    elif total > 1:
        parts.append(element("p", f"{_plural(total - 1, 'more violation')} when it was reported."))
    if incident.followed:
        head = element(
            "tr",
            *(
                element("th", name)
                for name in ("check", "phase", "group", "slot", "position", "step", "request")
            ),
        )
        rows = [
            element(
                "tr",
                element("td", " + ".join(place.checks)),
                element("td", place.phase),
                element("td", place.group),
                element("td", place.slot),
                element("td", place.read_position),
                element("td", place.step),
                element("td", _name(place.request_id, place.request_uid), class_="id"),
            )
            for place in incident.followed
        ]
        shown = f"The first {len(rows)} of them" if len(rows) > 1 else "The other one"
        parts.append(
            element(
                "details",
                element("summary", shown),
                element("div", element("table", head, *rows), class_="scroll"),
            )
        )
    return join(*parts) if parts else element("p", "Nothing else so far.", class_="soft")


def _advice(label: str, runbook: str) -> Html:
    check = check_named(label)
    causes = element("ul", *(element("li", cause) for cause in check.causes))
    return element(
        "div",
        element("p", element("strong", label), f": {check.meaning}"),
        element("p", check.do),
        element("details", element("summary", "Usual causes"), causes),
        element("p", element("a", f"Runbook: {label}", href=f"{runbook}#check-{label}")),
        class_="advice",
    )


def _name(request_id: str | None, uid: int | None) -> str:
    if request_id is not None:
        return request_id
    return "not known" if uid is None else f"#{uid}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
