"""What a launch works on: the write plan, the verify plan, and the page table read in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch


def _tensor(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=device)


def _check_capacity(name: str, capacity: int) -> None:
    if capacity <= 0:
        raise ValueError(
            f"kvcanary: {name} must be positive, got {capacity}; "
            "allowed: 1 or more; size it for the largest batch"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WritePlan:
    """Which entries of a forward belong to which request, and what each chain continues from.

    Request ``r`` owns the entries ``[write_offsets[r], write_offsets[r + 1])`` of ``input_ids``,
    ``positions`` and ``out_cache_loc``. Everything at and beyond ``write_num_valid_reqs`` is
    ignored. All tensors are contiguous and on the records' device.

    Fields:
        write_offsets: int64 [capacity + 1], exclusive prefix sums, starting at 0.
        write_seed_slot_indices: int64 [capacity]; slot of the last prefix token, -1 when there is
            no prefix.
        write_num_valid_reqs: int32 [1]; requests in the plan.
        write_request_uids: int64 [capacity] or None; who writes, -1 unknown. None: all unknown.
        write_identity_keys: int64 [capacity] or None; key mixed into the anchor of a chain that
            starts here. None: 0 for all.
    """

    write_offsets: torch.Tensor
    write_seed_slot_indices: torch.Tensor
    write_num_valid_reqs: torch.Tensor
    write_request_uids: torch.Tensor | None = None
    write_identity_keys: torch.Tensor | None = None

    @classmethod
    def allocate(cls, *, write_req_capacity: int, device: torch.device | str) -> WritePlan:
        """An uninitialised plan for up to ``write_req_capacity`` requests, uids and keys included.

        ValueError when the capacity is not positive.
        """
        _check_capacity("WritePlan write_req_capacity", write_req_capacity)
        device = torch.device(device)
        return cls(
            write_offsets=_tensor(write_req_capacity + 1, torch.int64, device),
            write_seed_slot_indices=_tensor(write_req_capacity, torch.int64, device),
            write_num_valid_reqs=_tensor(1, torch.int32, device),
            write_request_uids=torch.full(
                (write_req_capacity,), -1, dtype=torch.int64, device=device
            ),
            write_identity_keys=torch.zeros(write_req_capacity, dtype=torch.int64, device=device),
        )

    def zero_for_testing_(self) -> WritePlan:
        """Zero every tensor, so that a test of the plan launch can compare whole tensors."""
        for tensor in (
            self.write_offsets,
            self.write_seed_slot_indices,
            self.write_num_valid_reqs,
            self.write_request_uids,
            self.write_identity_keys,
        ):
            if tensor is not None:
                tensor.zero_()
        return self


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VerifyPlan:
    """A materialised list of slots to verify, one entry a slot.

    Entries at and beyond ``verify_num_valid`` are ignored. All tensors are contiguous and on the
    records' device.

    Fields:
        verify_slot_indices: int64 [capacity]; slot 0 is skipped (but counted).
        verify_expected_tokens: int64 [capacity]; -1 where nothing is known.
        verify_expected_positions: int64 [capacity].
        verify_prev_slot_indices: int64 [capacity]; slot of the position before; -1 for the head of
            a chain, 0 where that slot is not reachable any more.
        verify_num_valid: int32 [1]; entries in the plan.
        enable: int32 [1]; 0 skips the launch.
        verify_request_uids: int64 [capacity] or None; who reads, -1 unknown.
        verify_batch_rows: int64 [capacity] or None; row in the batch, -1 unknown.
        verify_identity_keys: int64 [capacity] or None; key in the anchor of the entry's chain.
    """

    verify_slot_indices: torch.Tensor
    verify_expected_tokens: torch.Tensor
    verify_expected_positions: torch.Tensor
    verify_prev_slot_indices: torch.Tensor
    verify_num_valid: torch.Tensor
    enable: torch.Tensor
    verify_request_uids: torch.Tensor | None = None
    verify_batch_rows: torch.Tensor | None = None
    verify_identity_keys: torch.Tensor | None = None

    @classmethod
    def allocate(cls, *, verify_capacity: int, device: torch.device | str) -> VerifyPlan:
        """An uninitialised plan for up to ``verify_capacity`` slots, without the optional tensors.

        ValueError when the capacity is not positive.
        """
        _check_capacity("VerifyPlan verify_capacity", verify_capacity)
        device = torch.device(device)
        return cls(
            verify_slot_indices=_tensor(verify_capacity, torch.int64, device),
            verify_expected_tokens=_tensor(verify_capacity, torch.int64, device),
            verify_expected_positions=_tensor(verify_capacity, torch.int64, device),
            verify_prev_slot_indices=_tensor(verify_capacity, torch.int64, device),
            verify_num_valid=_tensor(1, torch.int32, device),
            enable=_tensor(1, torch.int32, device),
        )

    def zero_for_testing_(self) -> VerifyPlan:
        """Zero every tensor, so that a test of the plan launch can compare whole tensors."""
        for tensor in (
            self.verify_slot_indices,
            self.verify_expected_tokens,
            self.verify_expected_positions,
            self.verify_prev_slot_indices,
            self.verify_num_valid,
            self.enable,
            self.verify_request_uids,
            self.verify_batch_rows,
            self.verify_identity_keys,
        ):
            if tensor is not None:
                tensor.zero_()
        return self


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableReads:
    """What a batch reads: per request a row of the page table and the length of its prefix.

    Request ``r`` reads the positions ``[start, prefix_lens[r])`` of row ``request_rows[r]``, where
    ``start`` is ``max(0, prefix_lens[r] - swa_window_size)`` with a window and 0 without. All
    tensors are on the records' device and may be int32 or int64 unless said.

    Fields:
        page_table: [rows, width]; entry ``[row, position // page_size]`` is a page (a slot when
            page_size is 1). Rows are contiguous and stepped by ``stride(0)``.
        page_size: slots per entry of the page table.
        padding_row: request row that pads batches; its requests are left out. -1 if there is none.
        request_rows: [bs].
        request_uids: int64 [bs]; who reads, -1 unknown.
        prefix_lens: [bs]; tokens whose K/V existed before this forward.
        extend_lens: [bs]; tokens of this forward.
        max_prefix_len: upper bound of prefix_lens known to the host. It sizes the launch only:
            every position below prefix_lens is covered whatever it says.
        full_to_swa_index_mapping: [full slots] or None; lookup table from the page table's slots to
            the slots of the records, 0 or below where not mapped.
        swa_window_size: earlier tokens that a token sees; 0 for full attention.
        identity_keys: int64 [bs] or None; key in the anchor of the request's chain.
        expected_tokens: [rows, width] or None; the requests' own token history by table row.
        expected_valid_lens: [bs] or None (together with expected_tokens); tokens known per request.
        token_offset: the slot of position p holds the K/V of the token at p + token_offset.
        prefix_hashes: int64 [bs] or None; the running chain hash after the last prefix token, as
            the host computed it from the request's own tokens and identity key.
        prefix_hash_valid: int32 [bs] or None (together with prefix_hashes); not 0 where to compare.
    """

    page_table: torch.Tensor
    page_size: int
    padding_row: int
    request_rows: torch.Tensor
    request_uids: torch.Tensor
    prefix_lens: torch.Tensor
    extend_lens: torch.Tensor
    max_prefix_len: int
    full_to_swa_index_mapping: torch.Tensor | None = None
    swa_window_size: int = 0
    identity_keys: torch.Tensor | None = None
    expected_tokens: torch.Tensor | None = None
    expected_valid_lens: torch.Tensor | None = None
    token_offset: int = 0
    prefix_hashes: torch.Tensor | None = None
    prefix_hash_valid: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableSnapshot:
    """What the page table said about the prefixes of a batch, at one moment.

    An entry is a page of the table (``page_size`` positions), or, with a lookup table, the looked
    up slot of one position. Row ``rows[r]`` of ``entries`` holds those of request ``r`` in the
    columns of its prefix, from the window's start on; other columns hold anything.

    Fields:
        entries: int32 or int64 [kept requests, width], contiguous rows; as wide as the values that
            the table (with a lookup table: that one) may hold.
        rows: int64 [bs]; row of ``entries``, -1 where the request is not kept.
        table_rows: int64 [bs]; row of the page table.
        prefix_lens: int64 [bs].
    """

    entries: torch.Tensor
    rows: torch.Tensor
    table_rows: torch.Tensor
    prefix_lens: torch.Tensor
