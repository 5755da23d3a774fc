"""Batches of both model runners as steps: what is read, written, and known to the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvcanary_plugin.cache import KVCacheGroup
from kvcanary_plugin.forward import ForwardKind, ForwardStep
from kvcanary_plugin.hooks.vllm import batch_v2
from kvcanary_plugin.hooks.vllm.batch_v1 import V1Translator
from kvcanary_plugin.hooks.vllm.batch_v2 import PreparedBatch, V2Translator
from kvcanary_plugin.hooks.vllm.pools import GuardedCaches
from kvcanary_plugin.hooks.vllm.requests import RequestBook
from kvcanary_plugin.violations import RequestNames

ROWS, WIDTH, TOKENS = 4, 64, 32


def caches(*group_ids: int) -> GuardedCaches:
    groups = tuple(
        KVCacheGroup(
            name=f"group{group_id}",
            num_slots=64,
            page_table=torch.zeros((ROWS, 8), dtype=torch.int32),
            page_size=8,
            padding_row=-1,
            sources=(),
        )
        for group_id in group_ids
    )
    return GuardedCaches(
        groups=groups, group_ids=group_ids, block_sizes=(8,) * len(group_ids), unguarded=()
    )


def book(*, keeps_tokens: bool) -> RequestBook:
    return RequestBook(
        names=RequestNames(),
        device=torch.device("cpu"),
        max_requests=ROWS,
        keeps_tokens=keeps_tokens,
    )


def both(size: int, dtype: torch.dtype = torch.int32) -> Any:
    """vLLM's CpuGpuBuffer on a CPU."""
    tensor = torch.zeros(size, dtype=dtype)
    return SimpleNamespace(cpu=tensor, gpu=tensor, np=tensor.numpy())


class V1World:
    """A V1 runner's buffers: requests by row, with their own tokens and progress."""

    def __init__(self, *, groups: tuple[int, ...] = (0,), **attributes: Any) -> None:
        tables = [SimpleNamespace(slot_mapping=both(TOKENS, torch.int64)) for _ in range(3)]
        self.inputs = SimpleNamespace(
            block_table=tables,
            req_ids=[],
            num_reqs=0,
            num_computed_tokens_cpu=np.zeros(ROWS, dtype=np.int32),
            num_prompt_tokens=np.zeros(ROWS, dtype=np.int32),
            num_tokens_no_spec=np.zeros(ROWS, dtype=np.int32),
            token_ids_cpu=np.zeros((ROWS, WIDTH), dtype=np.int32),
        )
        self.runner = SimpleNamespace(
            input_batch=self.inputs,
            max_num_reqs=ROWS,
            query_start_loc=both(ROWS + 1),
            num_computed_tokens=torch.zeros(ROWS, dtype=torch.int32),
            seq_lens=torch.zeros(ROWS, dtype=torch.int32),
            input_ids=both(TOKENS),
            positions=torch.zeros(TOKENS, dtype=torch.int64),
            **attributes,
        )
        self.book = book(keeps_tokens=False)
        self.translator = V1Translator(runner=self.runner, caches=caches(*groups), book=self.book)
        self.known: set[str] = set()

    def step(
        self, *parts: tuple[str, list[int], int, int, int], drafts: bool = False
    ) -> ForwardStep:
        """``parts``: (id, tokens, prompt length, computed, scheduled) in the order of the rows."""
        new = [p for p in parts if p[0] not in self.known]
        self.known |= {p[0] for p in new}
        output = SimpleNamespace(
            finished_req_ids=set(),
            scheduled_new_reqs=[SimpleNamespace(req_id=p[0], lora_request=None) for p in new],
            total_num_scheduled_tokens=sum(p[4] for p in parts),
            scheduled_spec_decode_tokens={"x": [1]} if drafts else {},
        )
        inputs, runner = self.inputs, self.runner
        inputs.req_ids, inputs.num_reqs = [p[0] for p in parts], len(parts)
        start = 0
        for row, (_, tokens, prompt, computed, scheduled) in enumerate(parts):
            inputs.num_computed_tokens_cpu[row] = computed
            inputs.num_prompt_tokens[row] = prompt
            inputs.num_tokens_no_spec[row] = len(tokens)
            inputs.token_ids_cpu[row, : len(tokens)] = tokens
            runner.num_computed_tokens[row] = computed
            runner.seq_lens[row] = computed + scheduled
            runner.query_start_loc.np[row] = start
            start += scheduled
            runner.query_start_loc.np[row + 1] = start
        self.book.scheduled(output)
        self.longest_extend = self.translator.longest_extend(output)
        return self.translator.translate(output)


def test_the_longest_extend_of_a_pure_decode_is_one():
    v1, v2 = V1World(), V2World()
    v1.step(("a", [5, 6, 7, 8], 4, 3, 1), ("b", [5, 6, 7, 8], 4, 3, 1))
    v2.step(("a", [5, 6, 7, 8], 3, 1), ("b", [5, 6, 7, 8], 3, 1))
    assert v1.longest_extend == v2.longest_extend == 1
    v1.step(("a", [5, 6, 7, 8], 4, 0, 3), ("b", [5, 6, 7, 8], 4, 3, 1))
    v2.step(("a", [5, 6, 7, 8], 0, 3), ("b", [5, 6, 7, 8], 3, 1))
    assert v1.longest_extend == v2.longest_extend == 3


def test_v1_a_prompt_chunk_gives_the_hosts_tokens_up_to_its_end():
    world = V1World()
    step = world.step(("a", [5, 6, 7, 8, 9], 5, 0, 3))
    assert step.kind is ForwardKind.PREFILL
    assert step.prefix_lens.tolist() == [0]
    assert step.extend_lens.tolist() == [3]
    (known,) = step.host_tokens
    assert (known.prefix_len, known.tokens.tolist()) == (0, [5, 6, 7])
    assert known.request_uid == step.request_uids.tolist()[0]


def test_v1_the_last_prompt_token_alone_in_a_chunk_is_still_prompt():
    world = V1World()
    world.step(("a", [5, 6, 7, 8], 4, 0, 3))
    step = world.step(("a", [5, 6, 7, 8], 4, 3, 1))
    (known,) = step.host_tokens
    assert (known.prefix_len, known.tokens.tolist()) == (3, [5, 6, 7, 8])


def test_v1_a_pure_decode_says_nothing_of_tokens():
    world = V1World()
    world.step(("a", [5, 6], 2, 0, 2), ("b", [7, 8], 2, 0, 2))
    step = world.step(("a", [5, 6, 9], 2, 2, 1), ("b", [7, 8, 9], 2, 2, 1))
    assert step.kind is ForwardKind.DECODE
    assert step.host_tokens == ()
    assert step.extend_lens.tolist() == [1, 1]
    assert step.max_prefix_len == 2
    assert step.host_prefix_lens is not None
    assert step.host_prefix_lens.tolist() == [2, 2]


def test_v1_decodes_beside_a_prompt_are_mixed():
    world = V1World()
    world.step(("a", [5, 6], 2, 0, 2))
    step = world.step(("a", [5, 6, 9], 2, 2, 1), ("b", [7, 8, 3], 3, 0, 3))
    assert step.kind is ForwardKind.MIXED
    assert step.extend_lens.tolist() == [1, 3]
    assert [known.batch_row for known in step.host_tokens] == [1]


def test_v1_a_request_that_resumes_brings_its_output_as_well():
    world = V1World()
    world.step(("a", [5, 6], 2, 0, 2), ("b", [1, 2], 2, 0, 2))
    world.step(("b", [1, 2, 3], 2, 2, 1))
    step = world.step(("b", [1, 2, 3, 4], 2, 3, 1), ("a", [5, 6, 9, 9], 2, 0, 4))
    (known,) = step.host_tokens
    assert (known.batch_row, known.tokens.tolist()) == (1, [5, 6, 9, 9])


def test_v1_placeholders_in_a_prefix_leave_the_identity_check_out():
    world = V1World()
    step = world.step(("a", [5, 6, -1, -1], 2, 3, 1))
    (known,) = step.host_tokens
    assert known.prefix_len == 0


def test_v1_a_request_that_takes_anothers_row_is_named():
    world = V1World()
    world.step(("a", [1], 1, 0, 1), ("b", [2], 1, 0, 1))
    step = world.step(("b", [2, 3], 1, 1, 1))
    assert step.moved_rows is not None
    assert [rows.tolist() for rows in step.moved_rows] == [[1], [0]]


def test_v1_drafts_make_a_verify_and_under_async_scheduling_host_lengths_are_not_known():
    sync, asynchronous = V1World(), V1World(use_async_spec_decode=True)
    for world in (sync, asynchronous):
        world.step(("a", [5, 6], 2, 0, 2))
    step = sync.step(("a", [5, 6, 9, 1, 1], 2, 2, 3), drafts=True)
    assert step.kind is ForwardKind.VERIFY
    assert step.host_prefix_lens is not None
    step = asynchronous.step(("a", [5, 6, 9, 1, 1], 2, 2, 3), drafts=True)
    assert step.host_prefix_lens is None


def test_v1_each_guarded_group_has_its_own_slots():
    world = V1World(groups=(0, 2))
    world.inputs.block_table[2].slot_mapping.gpu[:2] = torch.tensor([40, 41])
    step = world.step(("a", [5, 6], 2, 0, 2))
    assert [slots.tolist() for slots in step.out_cache_loc] == [[0, 0], [40, 41]]


def test_v1_accepted_drafts_stand_behind_the_last_certain_token():
    world = V1World()
    world.step(("a", [5, 6], 2, 0, 2))
    world.step(("a", [5, 6, 9, 1, 1], 2, 2, 3), drafts=True)
    sampled = torch.tensor([[11, 12, -1]])
    metadata = SimpleNamespace(num_draft_tokens=[2])
    columns = list(world.translator.sampled(sampled, metadata))
    assert [positions.tolist() for _, positions, _ in columns] == [[3], [4], [5]]
    assert [tokens.tolist() for _, _, tokens in columns] == [[11], [12], [-1]]


@pytest.mark.parametrize("names_kernel_blocks", [True, False], ids=["0.26", "0.32"])
def test_v2_the_pages_of_a_table_are_the_kernels_blocks(names_kernel_blocks):
    tables = SimpleNamespace(input_block_tables=[torch.zeros((2, 8), dtype=torch.int32)])
    if names_kernel_blocks:
        tables.block_sizes, tables.kernel_block_sizes = [128], [64]
    else:
        tables.block_sizes = [64]
    (table,) = batch_v2.block_tables(SimpleNamespace(block_tables=tables))
    assert table.page_size == 64


class V2World:
    """A V2 runner's batches."""

    def __init__(self, *, groups: tuple[int, ...] = (0,), drafts: int = 0) -> None:
        self.runner = SimpleNamespace(
            max_num_reqs=ROWS,
            num_speculative_steps=drafts,
            req_states=SimpleNamespace(
                total_len=SimpleNamespace(gpu=torch.zeros(ROWS, dtype=torch.int32))
            ),
        )
        self.book = book(keeps_tokens=True)
        self.translator = V2Translator(runner=self.runner, caches=caches(*groups), book=self.book)
        self.slots = torch.full((3, TOKENS), -1, dtype=torch.int64)
        self.known: set[str] = set()

    def step(
        self,
        *parts: tuple[str, list[int], int, int],
        num_draft_tokens: int = 0,
        accepted_behind: int = 0,
    ) -> ForwardStep:
        """``parts``: (id, tokens it was admitted with, computed, scheduled)."""
        new = [p for p in parts if p[0] not in self.known]
        self.known |= {p[0] for p in new}
        self.book.scheduled(
            SimpleNamespace(
                finished_req_ids=set(),
                scheduled_new_reqs=[
                    SimpleNamespace(req_id=p[0], lora_request=None, prefill_token_ids=p[1])
                    for p in new
                ],
            )
        )
        scheduled = np.array([p[3] for p in parts], dtype=np.int32)
        computed = np.array([p[2] for p in parts], dtype=np.int32)
        prefill = np.array([len(p[1]) for p in parts], dtype=np.int32)
        prepared = PreparedBatch(
            self._batch(
                req_ids=[p[0] for p in parts],
                scheduled=scheduled,
                # The device knows of rejected drafts, the host does not.
                seq_lens=computed - accepted_behind + scheduled,
                num_computed_tokens_np=computed,
                is_prefilling_np=computed < prefill,
                num_draft_tokens=num_draft_tokens,
            ),
            self.slots,
            is_dummy=False,
        )
        self.longest_extend = self.translator.longest_extend(prepared)
        return self.translator.translate(prepared)

    def _batch(self, *, scheduled: Any, seq_lens: Any, **fields: Any) -> Any:
        starts = np.concatenate([[0], np.cumsum(scheduled)]).astype(np.int32)
        return SimpleNamespace(
            num_reqs=len(scheduled),
            num_tokens=int(scheduled.sum()),
            num_scheduled_tokens=scheduled,
            query_start_loc=torch.from_numpy(starts),
            seq_lens=torch.from_numpy(seq_lens),
            input_ids=torch.zeros(TOKENS, dtype=torch.int32),
            positions=torch.zeros(TOKENS, dtype=torch.int64),
            **fields,
        )

    def dummy_step(self, tokens: int) -> ForwardStep:
        batch = self._batch(
            scheduled=np.array([tokens], dtype=np.int32),
            seq_lens=np.array([tokens], dtype=np.int32),
        )
        return self.translator.translate(PreparedBatch(batch, self.slots, is_dummy=True))


def test_v2_a_prompt_chunk_gives_the_hosts_tokens_up_to_its_end():
    step = V2World().step(("a", [5, 6, 7, 8, 9], 2, 2))
    assert step.kind is ForwardKind.PREFILL
    assert step.prefix_lens.tolist() == [2]
    assert step.extend_lens.tolist() == [2]
    (known,) = step.host_tokens
    assert (known.prefix_len, known.tokens.tolist()) == (2, [5, 6, 7, 8])


def test_v2_the_last_prompt_token_alone_in_a_chunk_is_still_prompt():
    world = V2World()
    world.step(("a", [5, 6, 7], 0, 2))
    step = world.step(("a", [5, 6, 7], 2, 1))
    (known,) = step.host_tokens
    assert known.tokens.tolist() == [5, 6, 7]


def test_v2_a_pure_decode_says_nothing_of_tokens():
    world = V2World()
    world.step(("a", [5, 6], 0, 2), ("b", [1], 0, 1))
    step = world.step(("a", [5, 6], 2, 1), ("b", [1], 1, 1))
    assert step.kind is ForwardKind.DECODE
    assert step.host_tokens == ()
    assert step.extend_lens.tolist() == [1, 1]
    assert step.prefix_lens.tolist() == [2, 1]


def test_v2_verifies_below_what_the_device_has_counted():
    world = V2World(drafts=2)
    world.step(("a", [5, 6], 0, 2))
    step = world.step(("a", [5, 6], 6, 3), num_draft_tokens=2, accepted_behind=1)
    assert step.kind is ForwardKind.VERIFY
    assert step.prefix_lens.tolist() == [5]
    assert step.max_prefix_len == 6
    assert step.host_prefix_lens is None


def test_v2_slots_of_the_guarded_groups_only():
    world = V2World(groups=(2,))
    world.slots[2, 0] = 17
    (slots,) = world.step(("a", [5], 0, 1)).out_cache_loc
    assert slots[0] == 17


def test_v2_a_dummy_batch_stands_for_nobody_and_its_slots_are_looked_at():
    step = V2World().dummy_step(3)
    assert step.kind is ForwardKind.DUMMY
    assert step.request_uids.tolist() == [-1]
    assert step.prefix_lens.tolist() == [0]
    assert step.extend_lens.tolist() == [3]
    assert step.out_cache_loc[0].tolist() == [-1] * TOKENS


@pytest.mark.parametrize(("num_sampled", "kept"), [(2, [11, 12, -1]), (0, [-1, -1, -1])])
def test_v2_only_tokens_that_were_sampled_are_told(num_sampled, kept):
    world = V2World(drafts=2)
    world.runner.req_states.total_len.gpu[3] = 9
    columns = list(
        world.translator.sampled(
            torch.tensor([[11, 12, 13]]), torch.tensor([num_sampled]), torch.tensor([3])
        )
    )
    assert [positions.tolist() for _, positions, _ in columns] == [[9], [10], [11]]
    assert [int(tokens[0]) for _, _, tokens in columns] == kept
