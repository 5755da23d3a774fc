"""The report page: escaped, self-contained, and whole in a real browser."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from kvcanary_plugin.checks import CHECKS
from kvcanary_plugin.cli import main
from kvcanary_plugin.forward import ForwardKind
from kvcanary_plugin.incident_file import Incident, read_incidents
from kvcanary_plugin.report_page import render_page
from tests.monitor.incident_world import IncidentWorld
from tests.monitor.world import Part

HOSTILE = "<script>document.title='owned'</script>\"'><img src=x onerror=alert(1)>"
CHROMIUM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A foreign write by a request with a hostile id, and a flipped byte of another request."""
    world = IncidentWorld(
        directory=tmp_path_factory.mktemp("world"), request_ids={1: "A", 2: HOSTILE}
    )
    prompt = [11, 7, 7, 300, 0]
    world.forward(Part(uid=1, row=1, tokens=prompt, slots=[5, 6, 9, 2, 31]))
    world.forward(Part(uid=3, row=3, tokens=[60, 61], slots=[40, 41]))
    world.bytes_of(world.full_kv[0], 40)[0] ^= 1
    world.forward(Part(uid=2, row=2, tokens=[50, 51, 52], slots=[20, 9, 22]))
    world.forward(
        Part(uid=1, row=1, tokens=[*prompt, 1], slots=[12], prefix=5, host_knows_tokens=False),
        Part(uid=3, row=3, tokens=[60, 61, 1], slots=[42], prefix=2, host_knows_tokens=False),
        kind=ForwardKind.DECODE,
    )
    world.drain.stop()
    return world.reports


@pytest.fixture
def page(reports: Path, tmp_path: Path) -> Path:
    output = tmp_path / "page.html"
    assert main(["report", str(reports), "-o", str(output)]) == 0
    return output


class Outline(HTMLParser):
    """Tags, attributes and visible text of a page; fails on tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.handle_startendtag(tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


# --- what is in it --------------------------------------------------------------------------------


def test_the_page_tells_each_incident_from_cause_to_advice(page: Path):
    text = " ".join(Outline(page.read_text()).text.split())
    assert "2 incidents, 3 violations" in text
    for part in (
        "at step 3 while request A still owned it",
        "holds 1, read as 2",
        "Time line",
        "wrote position 1 to it",
        "Slots around position 2",
        "What followed from it",
        "What to do next",
        "kvcanary replay",
    ):
        assert part in text


def test_each_failed_check_is_linked_to_its_place_in_the_runbook(reports: Path):
    incidents, ends = read_incidents(reports)
    text = render_page(incidents, ends, source="x", runbook="https://example.org/runbook.md")
    for label in ("chain", "position", "token", "real_kv"):
        assert f'href="https://example.org/runbook.md#check-{label}"' in text


def test_the_runbook_has_a_place_for_each_check():
    runbook = Path(__file__).parents[2] / "docs" / "runbook.md"
    headings = re.findall(r"^#+ (.*)$", runbook.read_text(), re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    assert {f"check-{check.label}" for check in CHECKS} <= anchors


def test_nothing_of_a_request_id_becomes_markup(page: Path):
    outline = Outline(page.read_text())
    assert HOSTILE in outline.text
    assert {"script", "img"} & set(outline.tags) == set()
    assert not [name for name, _ in outline.attributes if name.startswith("on")]


def test_the_page_loads_nothing(page: Path):
    outline = Outline(page.read_text())
    assert {"script", "link", "img", "iframe", "object"} & set(outline.tags) == set()
    targets = [value for name, value in outline.attributes if name in ("src", "href")]
    assert all(target and target.startswith(("#", "runbook.md#")) for target in targets)
    assert "url(" not in page.read_text()
    assert "@import" not in page.read_text()
    assert "default-src &#x27;none&#x27;" in page.read_text()


def test_an_empty_directory_makes_a_page_that_says_so(tmp_path: Path):
    assert "No incident." in Outline(render_page([], {}, source="here", runbook="x")).text


def test_an_incident_without_evidence_says_why(reports: Path):
    incidents, _ = read_incidents(reports)
    bare = [
        incident.model_copy(update={"evidence": None, "no_evidence_because": "no room"})
        for incident in incidents
    ]
    assert "No evidence: no room." in Outline(render_page(bare, {}, source="x", runbook="y")).text


@pytest.mark.parametrize("phase", ["verify", "write", "scrub", "lifecycle", "reverify"])
def test_every_kind_of_root_can_be_shown(phase: str, reports: Path):
    incidents, ends = read_incidents(reports)
    for check in CHECKS:
        changed: list[Incident] = []
        for incident in incidents:
            assert incident.evidence is not None
            root = incident.root.model_copy(
                update={
                    "checks": [check.label],
                    "phase": phase,
                    "request_uid": None,
                    "request_id": None,
                    "slot": -1,
                }
            )
            evidence = incident.evidence.model_copy(update={"requests": []})
            changed.append(incident.model_copy(update={"root": root, "evidence": evidence}))
        Outline(render_page(changed, ends, source="x", runbook="y"))


def test_the_page_goes_to_standard_output_without_a_file(
    reports: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["report", str(reports)]) == 0
    assert capsys.readouterr().out.startswith("<!doctype html>")


def test_what_cannot_be_read_or_written_is_status_2(
    reports: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["report", str(reports), "-o", str(tmp_path / "no" / "page.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


# --- in a browser ---------------------------------------------------------------------------------


def browse(page: Path, profile: Path, *options: str) -> str:
    assert CHROMIUM is not None
    result = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--disable-dev-shm-usage",
            f"--user-data-dir={profile}",
            "--window-size=800,900",
            *options,
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return result.stdout


needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")


@needs_browser
def test_a_browser_builds_the_whole_page_and_runs_nothing_of_it(page: Path, tmp_path: Path):
    dom = browse(page, tmp_path / "profile", "--dump-dom")
    assert dom.count("<section") == 2
    assert dom.count("<svg") == 2
    assert "<title>kvcanary: 2 incidents</title>" in dom
    assert "owned" in dom, "the hostile id is there, as text"
    assert "<script" not in dom


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_paints_it_readably_in_light_and_dark(scheme: str, page: Path, tmp_path: Path):
    picture = tmp_path / "page.png"
    dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    browse(page, tmp_path / "profile", *dark, f"--screenshot={picture}")
    pixels = _grey(picture)
    background = pixels[10][10]
    assert (background < 60) if scheme == "dark" else (background > 200)
    # Ink far from the background over most of a screen: text, tables, the time line.
    inked = sum(
        1 for row in pixels[::4] if any(abs(value - background) > 120 for value in row[::2])
    )
    assert inked > 60


def _grey(path: Path) -> list[bytes]:
    """Rows of a PNG (8 bit, RGB or RGBA, not interlaced) as the green channel."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    offset, compressed, header = 8, b"", b""
    while offset < len(data):
        length, kind = struct.unpack(">I4s", data[offset : offset + 8])
        body = data[offset + 8 : offset + 8 + length]
        header = body if kind == b"IHDR" else header
        compressed += body if kind == b"IDAT" else b""
        offset += 12 + length
    width, height, depth, color, _, _, interlace = struct.unpack(">IIBBBBB", header)
    assert (depth, interlace) == (8, 0)
    channels = {2: 3, 6: 4}[color]
    raw = torch.frombuffer(bytearray(zlib.decompress(compressed)), dtype=torch.uint8)
    lines = raw.reshape(height, 1 + width * channels)
    rows: list[bytes] = []
    above = [0] * (width * channels)
    for line in lines.tolist():
        above = _unfiltered(line[0], line[1:], above, channels)
        rows.append(bytes(above[1::channels]))
    return rows


def _unfiltered(kind: int, line: list[int], above: list[int], step: int) -> list[int]:
    if kind == 0:
        return line
    result = [0] * step + line
    up = [0] * step + above
    for index in range(step, len(result)):
        left, over, corner = result[index - step], up[index], up[index - step]
        if kind == 1:
            guess = left
        elif kind == 2:
            guess = over
        elif kind == 3:
            guess = (left + over) // 2
        else:
            estimate = left + over - corner
            guess = min((left, over, corner), key=lambda near: abs(estimate - near))
        result[index] = (result[index] + guess) & 0xFF
    return result[step:]
