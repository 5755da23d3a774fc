"""What a scheduler output asks of the records, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from kvcanary_plugin.cache import KVCacheGroup
from kvcanary_plugin.hooks.vllm import features
from kvcanary_plugin.hooks.vllm.attach import Session
from kvcanary_plugin.hooks.vllm.pools import GuardedCaches


class Monitor:
    """Notes what it is told."""

    def __init__(self, told: list[Any]) -> None:
        self.told = told

    def guard_errors(self, _where: str) -> Any:
        return nullcontext()

    def forget_everything(self) -> None:
        self.told.append("everything")

    def forget_slots(self, index: int, slots: torch.Tensor) -> None:
        self.told.append(("forget", index, slots.tolist()))

    def copy_slots(self, index: int, source: torch.Tensor, destination: torch.Tensor) -> None:
        self.told.append(("copy", index, source.tolist(), destination.tolist()))


def told_of(block_sizes: tuple[int, ...], **output: Any) -> list[Any]:
    """What a session with groups of these block sizes makes of a scheduler output."""
    told: list[Any] = []
    groups = tuple(
        KVCacheGroup(
            name=f"group{index}",
            num_slots=8 * size,
            page_table=torch.zeros((1, 8), dtype=torch.int32),
            page_size=size,
            padding_row=-1,
            sources=(),
        )
        for index, size in enumerate(block_sizes)
    )
    session: Any = object.__new__(Session)
    session.canary = SimpleNamespace(monitor=Monitor(told))
    session._caches = GuardedCaches(
        groups=groups,
        group_ids=tuple(range(len(groups))),
        block_sizes=block_sizes,
        unguarded=(),
    )
    session._book = SimpleNamespace(scheduled=lambda _output: told.append("requests"))
    session._loads = SimpleNamespace(scheduled=lambda _output: told.append("loads"))
    session._scheduled(SimpleNamespace(**output))
    return told


def test_blocks_are_cleared_then_copied_then_loaded():
    # A copy may go to a block that was cleared for it, and so may a load.
    told = told_of((2,), new_block_ids_to_zero=[5], kv_cache_block_copies=[(3, 5)])
    assert told == [
        "requests",
        ("forget", 0, [10, 11]),
        ("copy", 0, [6, 7], [10, 11]),
        "loads",
    ]


def test_records_that_groups_share_are_changed_once_and_others_by_their_own_numbers():
    told = told_of((2, 2, 4), new_block_ids_to_zero=[1], kv_cache_block_copies=None)
    assert told == ["requests", ("forget", 0, [2, 3]), ("forget", 2, [4, 5, 6, 7]), "loads"]


def test_a_version_without_either_changes_nothing():
    assert told_of((2,)) == ["requests", "loads"]


def test_records_go_before_the_memory_of_the_cache_does():
    told: list[Any] = []
    session: Any = object.__new__(Session)
    session.canary = SimpleNamespace(monitor=Monitor(told))
    session._around_sleep(lambda level: told.append(("sleep", level)), level=1)
    session._around_discard(lambda tags: told.append(tags), ("weights",))
    session._around_discard(lambda tags: told.append(tags), tags=("kv_cache",))
    assert told == ["everything", ("sleep", 1), ("weights",), "everything", ("kv_cache",)]


def test_an_error_behind_a_forward_does_not_reach_the_engine():
    caught: list[BaseException] = []

    @contextmanager
    def guard_errors(_where: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            caught.append(error)

    def fails() -> None:
        raise RuntimeError("no room")

    asked: list[dict[str, Any]] = []

    def around_forward(_translate: Any, **options: Any) -> Any:
        asked.append(options)
        return nullcontext()

    session: Any = object.__new__(Session)
    session.canary = SimpleNamespace(
        monitor=SimpleNamespace(guard_errors=guard_errors),
        around_forward=around_forward,
        requests_to_abort=lambda: (),
    )
    session._arrays_stay = True
    session._loads = SimpleNamespace(after_forward=fails)
    with session._around_forward(lambda: None, lambda: 17):
        pass
    assert [str(error) for error in caught] == ["no room"]
    assert [(it["arrays_stay"], it["longest_extend"]()) for it in asked] == [(True, 17)]


def test_arrays_stay_unless_a_model_has_media_or_a_connector_loads():
    def stay(*, media: bool, connector: object) -> bool:
        return features.arrays_stay_through_forward(
            SimpleNamespace(
                model_config=SimpleNamespace(is_multimodal_model=media),
                kv_transfer_config=connector,
            )
        )

    assert stay(media=False, connector=None)
    assert not stay(media=True, connector=None)
    assert not stay(media=False, connector=SimpleNamespace(kv_connector="NixlConnector"))
