"""The table of checks: the one place that ties a bit of the violation row to a label and to words.

Metrics, reports, ``kvcanary explain`` and the docs are made from it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

from kvcanary_plugin.config import CHECK_NAMES
from kvcanary_plugin.kernels.consts import FailReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check, as the operator meets it.

    Fields:
        label: metric label and name of the setting that turns it on.
        reasons: bits of the violation row that belong to it.
        meaning: what a violation of it says, one sentence.
        causes: what is usually behind it, the most likely first.
        do: what to do about it.
    """

    label: str
    reasons: FailReason
    meaning: str
    causes: tuple[str, ...]
    do: str


CHECKS: Final = (
    Check(
        label="chain",
        reasons=FailReason.VERIFY_CHAIN_HASH,
        meaning="A slot's record does not continue the record of the slot before it.",
        causes=(
            "a block of another sequence, or of an earlier use, stands inside this sequence",
            "the prefix cache matched a prefix that is not this request's",
            "a block was loaded into the wrong place",
        ),
        do="Compare the last writer with the reader: a different request points at the prefix cache"
        " or the allocator, the same request at the page table. At position 0 nothing comes before:"
        " the slot is another identity's, see prefix_identity.",
    ),
    Check(
        label="position",
        reasons=FailReason.VERIFY_POSITION,
        meaning="A slot holds the K/V of another position than the one at which it is read.",
        causes=(
            "entries of the page table were exchanged or shifted",
            "positions were off by one when the slot was written",
            "the slot was reused while this request still read it",
        ),
        do="Compare stored and expected position: a constant distance over many slots is a shift,"
        " two slots with each other's positions are exchanged entries.",
    ),
    Check(
        label="real_kv",
        reasons=FailReason.VERIFY_REAL_KV_HASH,
        meaning="The bytes of K or V changed after they were sealed, while the record did not.",
        causes=(
            "another kernel or a late transfer wrote over the slot",
            "an offload round trip returned other bytes",
            "memory returned other bits than were written to it",
        ),
        do="Look at what else wrote in that step: transfers and offload first, then kernels that"
        " write into the same pool. The same physical slots again and again point at the device.",
    ),
    Check(
        label="write_input",
        reasons=FailReason.WRITE_TOKEN | FailReason.WRITE_POSITION,
        meaning="A token or position that entered a forward is not the one the scheduler holds.",
        causes=(
            "positions of a chunk or of a decode step were computed wrongly",
            "under overlap scheduling, input rows of another step were used",
            "the input rows of two requests were exchanged",
        ),
        do="Look at how the engine prepared the inputs of that step; K/V of that request is wrong"
        " from that position on.",
    ),
    Check(
        label="token",
        reasons=FailReason.VERIFY_TOKEN,
        meaning="A slot holds the K/V of another token than the request has at that position.",
        causes=(
            "the prefix cache matched a prefix that is not this request's",
            "the slot was reused while this request still read it",
            "draft tokens were stored in the wrong order",
        ),
        do="Compare the last writer with the reader; the same request points at its own inputs.",
    ),
    Check(
        label="unwritten",
        reasons=FailReason.UNWRITTEN_READ,
        meaning="A slot is read that nobody wrote since it was allocated.",
        causes=(
            "a transfer or a load failed, or was published before it was complete",
            "the forward that should have written it was skipped",
            "the page table names a block of zeros",
        ),
        do="Look at transfers and loads of that request, and at the step that should have written"
        " the slot.",
    ),
    Check(
        label="freed_read",
        reasons=FailReason.FREED_READ,
        meaning="A slot is read after it was freed.",
        causes=(
            "the request's blocks were freed while a forward still used them",
            "eviction took a block that was in use",
            "the page table kept an entry that is no longer the request's",
        ),
        do="Look at why the slot was freed: the end or abort of a request, preemption, eviction.",
    ),
    Check(
        label="out_of_pool",
        reasons=FailReason.OUT_OF_POOL,
        meaning="A slot index, a page or a request row lies outside the pool or the page table.",
        causes=(
            "-1 or an uninitialised entry was used as an index",
            "the page table is narrower than the sequence",
            "a padding row, or a row of zeros, stands in a live range",
            "the full-to-SWA table lost an entry inside the window",
        ),
        do="Look at who filled that row of the table in that step.",
    ),
    Check(
        label="write_owned",
        reasons=FailReason.WRITE_OWNED,
        meaning="A slot is written while another live request owns it.",
        causes=(
            "the allocator handed the slot to two requests",
            "a forward of a finished request still wrote to its old slots",
            "a dummy batch wrote to real slots",
        ),
        do="Both requests are named in the report; both have wrong K/V from here on.",
    ),
    Check(
        label="double_free",
        reasons=FailReason.DOUBLE_FREE,
        meaning="A slot was freed that was free already.",
        causes=(
            "two owners of a block each freed it",
            "a finished request was cleaned up twice",
            "a stale entry of a lookup table was freed",
        ),
        do="The slot will be handed out twice; look at the two places that freed it.",
    ),
    Check(
        label="double_alloc",
        reasons=FailReason.DOUBLE_ALLOC,
        meaning="A slot was handed out while it was in use.",
        causes=(
            "it was freed twice before",
            "eviction freed a block that was in use",
        ),
        do="Look for a double free of the same slot, and at eviction.",
    ),
    Check(
        label="prefix_identity",
        reasons=FailReason.PREFIX_IDENTITY,
        meaning="A cached prefix given to a request is not the prefix of that request.",
        causes=(
            "the prefix cache matched without LoRA, cache salt, multimodal content or weights",
            "the prefix cache returned blocks of another prefix",
        ),
        do="Compare LoRA, salt, images and weight version of the reader and of the last writer.",
    ),
    Check(
        label="table_changed",
        reasons=FailReason.TABLE_CHANGED,
        meaning="A page-table row or a lookup entry changed while the forward that read it ran.",
        causes=(
            "the scheduler gave the row to another request too early",
            "a staging buffer was filled again before its copy ran",
            "a lookup entry was cleared before the read",
        ),
        do="Look at what the scheduler did between the launch and the end of that forward.",
    ),
)

_CHECK_OF_LABEL: Final = {check.label: check for check in CHECKS}
KNOWN_BITS: Final = sum(int(check.reasons) for check in CHECKS)


def check_named(label: str) -> Check:
    """The check with that metric label; ValueError names the ones there are."""
    if label not in _CHECK_OF_LABEL:
        raise ValueError(
            f"kvcanary: check got {label!r}; allowed {', '.join(CHECK_NAMES)}; use one of these"
        )
    return _CHECK_OF_LABEL[label]


@functools.lru_cache(maxsize=1024)  # a burst asks for the same bits again and again
def labels_of(reason_bits: int) -> tuple[str, ...]:
    """Labels of the checks whose bits are set; ValueError when a bit belongs to none."""
    labels = tuple(check.label for check in CHECKS if reason_bits & check.reasons)
    if not labels or reason_bits & ~KNOWN_BITS:
        raise ValueError(f"kvcanary: violation row with unknown reason bits {reason_bits:#x}")
    return labels
