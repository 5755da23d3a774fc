from __future__ import annotations

import pytest

from kvcanary_plugin.drill.metrics_client import MetricsSnapshot
from kvcanary_plugin.drill.settled import settled
from kvcanary_plugin.metrics import LAST_CHECK, SLOTS_SCRUBBED, VIOLATIONS

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


def test_settled_are_the_counts_that_two_looks_in_a_row_show_while_gauges_and_the_scrub_move_on():
    looks = ((0, 10), (3, 11), (3, 12), (4, 13))
    texts = iter(
        [
            f"{VIOLATIONS} {count}\n{LAST_CHECK} {time}\n{SLOTS_SCRUBBED} {time}\n"
            for count, time in looks
        ]
    )

    snapshot = settled(lambda: next(texts), pause_seconds=0.0)

    assert (snapshot.total(VIOLATIONS), snapshot.total(LAST_CHECK)) == (3, 12)
