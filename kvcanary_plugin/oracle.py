"""What each token of a request should be, from sources other than the forward's inputs.

Two oracles fill one table: prompt tokens come from the scheduler's own history on the host
(:meth:`TokenHistory.record_prompt`), generated ones from the sampler's output
(:meth:`TokenHistory.record_sampled`). Positions come from the scheduler's host-side lengths. The
write-input assert and the ``token`` check compare against this table.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from kvcanary_plugin.forward import ForwardStep, HostTokens, Int64Array
from kvcanary_plugin.identity import Fingerprint

NOT_KNOWN = -1


class TokenHistory:
    """Tokens per request row, on the device: int32 [rows, width], -1 where not known.

    Costs ``rows * width * 4`` bytes, which is why production leaves it off: there the chain and
    the prefix identity cover the tokens, and this table serves CI and debugging.
    """

    def __init__(self, *, rows: int, width: int, device: torch.device) -> None:
        self._tokens = torch.full((rows, width), NOT_KNOWN, dtype=torch.int32, device=device)
        self._uid_of_row: dict[int, int] = {}
        self._stored_len: dict[int, int] = {}
        self._stored: dict[int, int] = {}  # fingerprint of what is stored of a row's prompt
        self._fingerprint = Fingerprint()

    @property
    def tokens(self) -> torch.Tensor:
        """int32 [rows, width]; entry [row, position]."""
        return self._tokens

    def move_rows(self, old_rows: Int64Array, new_rows: Int64Array) -> None:
        """Follow requests whose row in the page table is another one now."""
        device = self._tokens.device
        source = torch.from_numpy(old_rows).to(device, non_blocking=True)
        destination = torch.from_numpy(new_rows).to(device, non_blocking=True)
        self._tokens[destination] = self._tokens[source]
        moved = [
            (
                int(new),
                self._uid_of_row.get(int(old), NOT_KNOWN),
                self._stored_len.get(int(old), 0),
                self._stored.get(int(old), 0),
            )
            for old, new in zip(old_rows, new_rows, strict=True)
        ]
        for row, uid, stored_len, stored in moved:
            self._uid_of_row[row] = uid
            self._stored_len[row] = stored_len
            self._stored[row] = stored

    def record_prompt(self, requests: Iterable[HostTokens]) -> None:
        """Store the tokens of requests that compute prompt tokens in the coming forward."""
        for request in requests:
            row = request.request_row
            if not self._is_tenant(request):
                # The row has a new tenant: nothing of the old one may serve as an expectation.
                self._uid_of_row[row] = request.request_uid
                self._tokens[row].fill_(NOT_KNOWN)
                self._stored_len[row] = self._stored[row] = 0
            start, end = self._stored_len[row], request.num_tokens
            if start < end:
                chunk = torch.from_numpy(_as_int32(request.tokens[start:end]))
                self._tokens[row, start:end].copy_(chunk, non_blocking=True)
                self._stored_len[row] = end
                self._stored[row] = self._fingerprint.of(request.tokens)

    def _is_tenant(self, request: HostTokens) -> bool:
        """Whether the row is this request's already; its uid may have been another's before."""
        row = request.request_row
        stored_len = self._stored_len.get(row, 0)
        return (
            self._uid_of_row.get(row) == request.request_uid
            and stored_len <= request.num_tokens
            and self._fingerprint.of(request.tokens[:stored_len]) == self._stored[row]
        )

    def record_sampled(
        self, request_rows: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        """Store what the sampler chose: token ``tokens[r]`` at ``positions[r]`` of row r.

        All [bs], on the device; rows whose position lies beyond the table are left out by
        clamping onto the last column, which no request of full length reads.
        """
        columns = positions.clamp(max=self._tokens.shape[1] - 1).long()
        self._tokens[request_rows.long(), columns] = tokens.to(torch.int32)

    def expected_inputs(
        self, step: ForwardStep, *, token_offset: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(expected tokens, expected positions) for the flat inputs of ``step``, int64 [n].

        In a group with a ``token_offset`` the slot of position p holds the token at p + offset.

        None when the scheduler's host-side lengths are not known for this forward. Where no oracle
        knows a token, the input itself stands in: the assert then checks the position only. Nothing
        is expected of rows without a request (uid below 0): what pads a batch may be anything.
        """
        if step.host_prefix_lens is None or step.host_extend_lens is None:
            return None
        host_rows, host_positions = flat_rows_and_positions(
            step.host_prefix_lens, step.host_extend_lens
        )
        device = self._tokens.device
        positions = step.positions.to(torch.int64).clone()
        tokens = step.input_ids.to(torch.int64).clone()
        count = host_positions.shape[0]
        if count == 0:
            return tokens, positions
        batch_rows = torch.from_numpy(host_rows).to(device, non_blocking=True)
        expected_positions = torch.from_numpy(host_positions).to(device, non_blocking=True)
        rows = step.request_rows.long()[batch_rows]
        pads = step.request_uids[batch_rows] < 0
        columns = expected_positions + token_offset
        inside = columns < self._tokens.shape[1]
        known = self._tokens[rows, columns.clamp(max=self._tokens.shape[1] - 1)].to(torch.int64)
        known = torch.where(inside, known, torch.full_like(known, NOT_KNOWN))
        tokens[:count] = torch.where((known == NOT_KNOWN) | pads, tokens[:count], known)
        positions[:count] = torch.where(pads, positions[:count], expected_positions)
        return tokens, positions


def _as_int32(tokens: Int64Array) -> npt.NDArray[np.int32]:
    """``tokens``; what stands for images and does not fit is not known here, only to the chain."""
    fits = (tokens >= 0) & (tokens <= np.iinfo(np.int32).max)
    return np.where(fits, tokens, NOT_KNOWN).astype(np.int32)


def flat_rows_and_positions(
    prefix_lens: Int64Array, extend_lens: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """For every flat token of a forward: its batch row and its position, from host lengths."""
    rows = np.repeat(np.arange(prefix_lens.shape[0], dtype=np.int64), extend_lens)
    starts = np.cumsum(extend_lens) - extend_lens
    within = np.arange(rows.shape[0], dtype=np.int64) - starts[rows]
    return rows, prefix_lens[rows] + within
