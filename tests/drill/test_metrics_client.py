from __future__ import annotations

import pytest

from kvcanary_plugin.drill.metrics_client import MetricsSnapshot
from kvcanary_plugin.drill.settled import settled
from kvcanary_plugin.metrics import DRAIN_POLLS, LAST_CHECK, SLOTS_SCRUBBED, VIOLATIONS

TEXT = """\
# HELP violations_total Violations.
# TYPE violations_total counter
violations_total{check="chain",group="full"} 2.0
violations_total{check="chain",group="swa"} 3.0
violations_total{check="real_kv",group="full"} 0.0
# TYPE other gauge
other 7.0
"""


def test_total_sums_the_series_that_carry_the_labels():
    snapshot = MetricsSnapshot.parse(TEXT)

    assert snapshot.total("violations_total") == 5
    assert snapshot.total("violations_total", check="chain") == 5
    assert snapshot.total("violations_total", check="chain", group="swa") == 3
    assert snapshot.total("violations_total", check="real_kv") == 0
    assert snapshot.total("other") == 7


@pytest.mark.parametrize(
    ("name", "labels"), [("violations", {}), ("violations_total", {"check": "chian"})]
)
def test_a_missing_series_is_an_error_and_not_zero(name, labels):
    with pytest.raises(LookupError, match="no such series"):
        MetricsSnapshot.parse(TEXT).total(name, **labels)


def test_series_lists_labels_and_values():
    (sample,) = MetricsSnapshot.parse(TEXT).series("violations_total", group="swa")

    assert (sample.labels["check"], sample.value) == ("chain", 3)


def test_text_that_is_no_exposition_is_refused():
    with pytest.raises(ValueError, match="nonsense"):
        MetricsSnapshot.parse("nonsense")


def told(*, violations: int, polls: tuple[int, int], others: int) -> str:
    """What a server of two ranks shows: gauges and the scrub move on whatever happens."""
    by_rank = "".join(
        f'{DRAIN_POLLS}{{tp_rank="{rank}"}} {count}\n' for rank, count in enumerate(polls)
    )
    return f"{VIOLATIONS} {violations}\n{LAST_CHECK} {others}\n{SLOTS_SCRUBBED} {others}\n{by_rank}"


def test_settled_are_counts_that_stand_still_while_every_drain_has_polled_twice():
    looks = iter(
        [
            told(violations=0, polls=(7, 9), others=10),
            told(violations=0, polls=(9, 10), others=11),  # the second rank is held up
            told(violations=3, polls=(40, 11), others=12),  # the counts have moved
            told(violations=3, polls=(41, 13), others=13),  # not twice since then
            told(violations=3, polls=(42, 14), others=14),
        ]
    )

    snapshot = settled(lambda: next(looks))

    assert (snapshot.total(VIOLATIONS), snapshot.total(LAST_CHECK)) == (3, 14)


def test_a_server_without_a_canary_is_settled_at_once():
    assert settled(lambda: TEXT).total("other") == 7


def test_a_drain_that_polls_no_more_is_not_waited_for_without_end():
    text = told(violations=1, polls=(7, 9), others=10)
    assert settled(lambda: text, longest_wait_seconds=0.1).total(VIOLATIONS) == 1
