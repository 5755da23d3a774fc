"""K/V that a connector brings: what is noted, which slots it concerns, when bytes are compared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvcanary_plugin.cache import KVCacheGroup, row_source
from kvcanary_plugin.config import CanaryConfig
from kvcanary_plugin.hooks.vllm import features
from kvcanary_plugin.hooks.vllm.pools import GuardedCaches
from kvcanary_plugin.hooks.vllm.transfers import (
    LOADS,
    Load,
    LoadedSlots,
    ScheduledLoads,
    UnknownLoadsError,
    slots_of_load,
)
from kvcanary_plugin.kernels import SlotState
from kvcanary_plugin.monitor import CanaryMonitor

BLOCK = 4
TOKENS = np.arange(20, 30, dtype=np.int32)  # ten of them: two blocks and a half


def a_load(*, start: int = 0, blocks: list[int] | None = None, end: int = 10) -> Load:
    return Load(
        request_id="a",
        start=start,
        tokens=TOKENS[:end],
        block_ids=(blocks if blocks is not None else [3, 5, 4],),
        key=0,
    )


def test_tokens_lie_in_the_blocks_of_the_request():
    first, previous, slots = slots_of_load(a_load(), 0, BLOCK)
    assert (first, previous) == (0, -1)
    assert slots.tolist() == [12, 13, 14, 15, 20, 21, 22, 23, 16, 17]


def test_what_is_cached_here_is_left_alone_and_continued():
    first, previous, slots = slots_of_load(a_load(start=4), 0, BLOCK)
    assert (first, previous) == (4, 15)
    assert slots.tolist() == [20, 21, 22, 23, 16, 17]


def test_behind_the_null_blocks_of_a_window_the_chain_starts_from_the_first_token():
    first, previous, slots = slots_of_load(a_load(start=4, blocks=[0, 5, 4]), 0, BLOCK)
    assert (first, previous) == (0, -1)
    assert slots.tolist() == [0, 0, 0, 0, 20, 21, 22, 23, 16, 17]


class Connector:
    """The scheduler's side of a connector."""

    role = None

    def __init__(self, external: int) -> None:
        self.external = external
        self.told: list[tuple[str, int]] = []

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return self.external, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.told.append((request.request_id, num_external_tokens))

    def build_connector_meta(self, scheduler_output: Any) -> str:
        return "meta"


def a_request() -> Any:
    return SimpleNamespace(
        request_id="a",
        all_token_ids=TOKENS.tolist(),
        num_prompt_tokens=10,
        mm_features=None,
        lora_request=None,
        cache_salt="tenant",
    )


BLOCKS = SimpleNamespace(get_block_ids=lambda: ([3, 5, 4],))


@pytest.mark.parametrize("rewrites", [False, True])
def test_a_load_travels_once_with_the_next_output_of_the_scheduler(rewrites):
    connector = Connector(external=4)
    ScheduledLoads(connector, rewrites_cached_tokens=rewrites)
    assert connector.get_num_new_matched_tokens(a_request(), 4) == (4, True)
    connector.update_state_after_alloc(a_request(), BLOCKS, 4)
    outputs = [SimpleNamespace(), SimpleNamespace()]
    assert [connector.build_connector_meta(output) for output in outputs] == ["meta", "meta"]
    (load,) = getattr(outputs[0], LOADS)
    assert load.start == (0 if rewrites else 4)
    assert load.tokens.tolist() == TOKENS[:8].tolist()
    assert load.block_ids == ([3, 5, 4],)
    assert load.key != 0
    assert not hasattr(outputs[1], LOADS)


def test_a_request_without_a_load_and_one_whose_load_is_done_are_not_noted():
    connector = Connector(external=0)
    ScheduledLoads(connector, rewrites_cached_tokens=False)
    connector.get_num_new_matched_tokens(a_request(), 4)
    connector.update_state_after_alloc(a_request(), BLOCKS, 0)
    output = SimpleNamespace()
    connector.build_connector_meta(output)
    assert connector.told == [("a", 0)]
    assert not hasattr(output, LOADS)


def test_a_load_that_cannot_be_noted_blinds_the_workers_and_not_the_engine():
    connector = Connector(external=4)
    ScheduledLoads(connector, rewrites_cached_tokens=False)
    request = a_request()
    del request.all_token_ids
    connector.get_num_new_matched_tokens(request, 4)
    connector.update_state_after_alloc(request, BLOCKS, 4)
    output = SimpleNamespace(finished_req_ids=set())
    assert connector.build_connector_meta(output) == "meta"
    with pytest.raises(UnknownLoadsError, match="all_token_ids"):
        Worker().loads.scheduled(output)


@pytest.mark.parametrize("name", ["ExampleConnector", "LMCacheConnectorV1", "OffloadingConnector"])
def test_connectors_that_load_what_is_cached_here_as_well_are_known(name):
    connector = type(name, (), {})()
    rewrites = name != "OffloadingConnector"
    assert features.rewrites_cached_tokens(connector) == rewrites
    several = SimpleNamespace(_connectors=[type("NixlConnector", (), {})(), connector])
    assert features.rewrites_cached_tokens(several) == rewrites


class Worker:
    """The worker's side over one group of 8 blocks."""

    def __init__(self) -> None:
        self.kv = torch.zeros((8, BLOCK * 8), dtype=torch.uint8)
        group = KVCacheGroup(
            name="full",
            num_slots=8 * BLOCK,
            page_table=torch.zeros((2, 8), dtype=torch.int32),
            page_size=BLOCK,
            padding_row=-1,
            sources=(row_source(self.kv, page_size=BLOCK),),
        )
        self.monitor = CanaryMonitor(
            config=CanaryConfig.model_validate({"verify": {"real_kv": "all"}}),
            groups=[group],
            max_requests=2,
            raise_pending=lambda: None,
            on_error=lambda where, error: pytest.fail(f"{where}: {error}"),
        )
        self.loads = LoadedSlots(
            monitor=self.monitor,
            caches=GuardedCaches(
                groups=(group,), group_ids=(0,), block_sizes=(BLOCK,), unguarded=()
            ),
        )

    def scheduled(self, *loads: Load, finished: tuple[str, ...] = ()) -> None:
        output = SimpleNamespace(finished_req_ids=set(finished))
        if loads:
            setattr(output, LOADS, list(loads))
        self.loads.scheduled(output)

    def forward(self, *request_ids: str) -> None:
        requests = [SimpleNamespace(uid=7) for _ in request_ids]
        self.loads.before_forward(SimpleNamespace(request_ids=request_ids, requests=requests))
        self.loads.after_forward()

    def states(self, *slots: int) -> set[int]:
        return set((self.monitor.guards[0].slots.state[list(slots)] & 0xFF).tolist())


def test_bytes_count_from_the_end_of_the_first_forward_of_their_request():
    worker = Worker()
    worker.scheduled(a_load())
    assert worker.states(12, 16) == {SlotState.WRITTEN}
    worker.forward("another")
    assert worker.states(12, 16) == {SlotState.WRITTEN}
    worker.forward("another", "a")
    assert worker.states(12, 16) == {SlotState.EXTERNAL}
    assert worker.states(1, 18, 24) == {SlotState.ALLOCATED}
    assert int(worker.monitor.guards[0].slots.writer_uid[12]) == 7


def test_a_request_that_is_given_up_while_it_loads_leaves_bytes_that_nobody_compares():
    worker = Worker()
    worker.scheduled(a_load())
    worker.scheduled(finished=("a",))
    worker.forward("a")
    assert worker.states(12, 16) == {SlotState.WRITTEN}


@pytest.mark.parametrize(
    ("config", "unknown"),
    [
        ({"kv_connector": "NixlConnector"}, []),
        ({"kv_connector": "Mine"}, ["Mine"]),
        ({"kv_connector": "NixlPushConnector"}, ["NixlPushConnector"]),
        ({"kv_connector": "HiSparseConnector"}, ["HiSparseConnector"]),
        ({"kv_connector": "NixlConnector", "kv_connector_module_path": "mine"}, ["NixlConnector"]),
        (
            {
                "kv_connector": "MultiConnector",
                "kv_connector_extra_config": {
                    "connectors": [
                        {"kv_connector": "OffloadingConnector"},
                        {"kv_connector": "NixlConnector", "kv_connector_module_path": "mine"},
                    ]
                },
            },
            ["mine"],
        ),
    ],
    ids=[
        "known",
        "unknown",
        "pushed into",
        "another memory",
        "own class of a known name",
        "several",
    ],
)
def test_connectors_that_are_not_known_are_named(config, unknown):
    assert features.unknown_connectors(SimpleNamespace(**config)) == unknown
