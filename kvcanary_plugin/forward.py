"""What one forward does, in words that no engine owns.

A hook translates its engine's batch into a :class:`ForwardStep`; nothing below the hooks ever sees
an engine type. For request ``r`` of a step, positions split into half-open ranges::

    [0, prefix_lens[r])                                  K/V existed before this forward: verified
    [prefix_lens[r], prefix_lens[r] + extend_lens[r])    written by this forward: recorded, sealed

The flat arrays (``input_ids``, ``positions``, ``out_cache_loc``) hold the extend ranges of all
requests one behind the other, ``sum(extend_lens)`` entries, and then padding nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import torch

Int64Array = npt.NDArray[np.int64]

# uid of the rows of a dummy batch that belong to no request: they own no slot, and none is theirs.
DUMMY_UID = -2


class ForwardKind(StrEnum):
    """Label ``kind`` of ``kvcanary_forwards_total``."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    VERIFY = "verify"
    DRAFT = "draft"
    DUMMY = "dummy"
    UNKNOWN = "unknown"


class ForwardResult(StrEnum):
    """Label ``result`` of ``kvcanary_forwards_total``: how far a forward was checked."""

    CHECKED = "checked"
    PARTIAL = "partial"
    UNCHECKED = "unchecked"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostTokens:
    """Tokens of one request as the scheduler keeps them: never read back from the device.

    Fields:
        batch_row: row of the request in the batch.
        request_row: its row in the page table.
        request_uid: its uid.
        prefix_len: tokens of it whose K/V existed before this forward.
        num_tokens: prefix_len + extend.
        source: int64 [num_tokens or more], the request's own tokens from position 0 on, or what
            makes them: an engine's list of numbers takes longer to convert than to launch a
            forward, and only some checks look at it.
        identity_key: its identity key, 0 for none.
    """

    batch_row: int
    request_row: int
    request_uid: int
    prefix_len: int
    num_tokens: int
    source: Int64Array | Callable[[], Int64Array]
    identity_key: int = 0

    @property
    def tokens(self) -> Int64Array:
        """int64 [num_tokens], the request's own tokens from position 0 on."""
        tokens = self.source() if callable(self.source) else self.source
        return tokens[: self.num_tokens]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardStep:
    """One forward of the engine (``bs`` requests, ``n`` tokens with padding).

    Integer tensors may be int32 or int64 and lie on the device of the groups.

    Fields:
        kind: what the forward is.
        step: number of the forward, counted by the monitor's user, strictly increasing.
        request_rows: [bs], row of each request in the page table.
        request_uids: int64 [bs], uid of each request; -1 for padding, which in a dummy batch the
            monitor takes for ``DUMMY_UID``.
        prefix_lens: [bs], tokens whose K/V existed before this forward.
        extend_lens: [bs], tokens whose K/V this forward writes.
        max_prefix_len: host-side upper bound of ``prefix_lens``; sizes the verify grid.
        input_ids: [n], token ids being written.
        positions: [n], their sequence positions.
        out_cache_loc: one tensor [n] per group, in the order of the groups: the slots being
            written, in the group's own slot numbering; -1 skips an entry.
        identity_keys: int64 [bs], or None when no request carries an identity key.
        host_prefix_lens: int64 [bs] on the host, from the scheduler's own book-keeping; None if the
            scheduler does not know them when the forward is launched.
        host_extend_lens: int64 [bs] on the host, likewise.
        max_extend_len: host-side upper bound of ``extend_lens`` where not each of them is known;
            None if the scheduler knows none.
        host_tokens: tokens of the requests that compute prompt tokens in this forward.
        moved_rows: (old rows, new rows), int64 [k] each on the host: running requests that stand in
            another row of the page table than in the forward before; None when none does.
        rows_trade_places: whether rows of the page table exchange what they hold between forwards
            (a beam search), so that nothing said of a row earlier holds for its tokens now.
        drafts_a_tree: whether the tokens of a request are the nodes of a tree of drafts, of which
            at most one path will stay, so that none follows the one before it. Every request has
            equally many. Their records chain up when ``CanaryMonitor.keep_drafts`` says which.
    """

    kind: ForwardKind
    step: int
    request_rows: torch.Tensor
    request_uids: torch.Tensor
    prefix_lens: torch.Tensor
    extend_lens: torch.Tensor
    max_prefix_len: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: tuple[torch.Tensor, ...]
    identity_keys: torch.Tensor | None = None
    host_prefix_lens: Int64Array | None = None
    host_extend_lens: Int64Array | None = None
    max_extend_len: int | None = None
    host_tokens: tuple[HostTokens, ...] = ()
    moved_rows: tuple[Int64Array, Int64Array] | None = None
    drafts_a_tree: bool = False
    rows_trade_places: bool = False

    @property
    def longest_extend(self) -> int:
        """Host-side upper bound of ``extend_lens``."""
        if self.host_extend_lens is not None:
            return int(self.host_extend_lens.max(initial=0))
        if self.max_extend_len is not None:
            return self.max_extend_len
        return int(self.input_ids.shape[0])

    @property
    def batch_size(self) -> int:
        """Requests of the batch, padding rows included."""
        return int(self.request_rows.shape[0])
