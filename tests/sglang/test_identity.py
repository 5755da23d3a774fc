"""What makes equal tokens another sequence: LoRA, salt, images; and whose process it is."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from kvcanary_plugin.hooks.sglang import versions
from kvcanary_plugin.hooks.sglang.batch import BatchTranslator
from tests.monitor.world import found
from tests.sglang.engine import Engine, Request

PROMPT = [5, 6, 7, 8, 9, 10]


@pytest.fixture
def engine(sglang_session: None) -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


def real_request(rid: str, **how: Any) -> Any:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    return Req(rid, "", array("q", PROMPT), SamplingParams(), vocab_size=100, **how)


def translator(engine: Engine) -> BatchTranslator:
    translator = engine.session._translator
    assert translator is not None
    return translator


def test_a_schedulers_request_carries_lora_and_salt_into_its_key(engine: Engine):
    key = translator(engine)._identity_key_of
    base = key(real_request("base"))
    assert base == 0
    keys = [
        key(real_request("lora", lora_id="x")),
        key(real_request("other lora", lora_id="y")),
        key(real_request("salt", extra_key="x")),
        key(real_request("both", lora_id="x", extra_key="x")),
    ]
    assert len({0, *keys}) == 5
    assert key(real_request("again", lora_id="x")) == keys[0]


def sharing(engine: Engine, one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """Checks that find a second request reading the first one's prefix."""
    first = Request("first", 1, list(PROMPT), **one)
    assert engine.prefill(first) == []
    second = Request("second", 2, [*PROMPT, 20], **other)
    engine.share(second, first.slots)
    seen = engine.prefill(second, prefix=len(PROMPT))
    return {check for check, _ in found(seen)}


@pytest.mark.parametrize("who", [{}, {"lora_id": "x"}, {"extra_key": "tenant"}])
def test_sharing_among_requests_of_one_identity_is_silent(engine: Engine, who: dict[str, Any]):
    assert sharing(engine, who, dict(who)) == set()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"lora_id": "x"}),
        ({"lora_id": "x"}, {"lora_id": "y"}),
        ({"lora_id": "x"}, {"extra_key": "x"}),
        ({"extra_key": "tenant"}, {"extra_key": "another"}),
    ],
)
def test_sharing_across_identities_is_found(
    engine: Engine, one: dict[str, Any], other: dict[str, Any]
):
    assert "prefix_identity" in sharing(engine, one, other)


def with_image(hash_value: int) -> list[int]:
    """The prompt with an image behind its third token, as the engine pads it."""
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

    item = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(3, 4)])
    item.set_hash(hash_value)
    return [*PROMPT[:3], *item.padding_sequence(2), *PROMPT[3:]]


def share_with_images(engine: Engine, one: int, other: int, *, prefix: int) -> set[str]:
    first = Request("first", 1, with_image(one))
    assert engine.prefill(first) == []
    second = Request("second", 2, with_image(other))
    engine.share(second, first.slots[:prefix])
    return {check for check, _ in found(engine.prefill(second, prefix=prefix))}


def test_the_text_in_front_of_different_images_is_shared_in_silence(engine: Engine):
    assert share_with_images(engine, 1 << 40, 2 << 40, prefix=3) == set()


def test_the_same_image_is_shared_in_silence(engine: Engine):
    assert share_with_images(engine, 1 << 40, 1 << 40, prefix=7) == set()


def test_the_kv_of_another_image_is_found(engine: Engine):
    assert "prefix_identity" in share_with_images(engine, 1 << 40, 2 << 40, prefix=7)


@pytest.mark.parametrize(
    ("ranks", "labels", "process"),
    [
        ({"tp_rank": 1, "tp_size": 2, "pp_rank": 0, "pp_size": 1, "dp_rank": None}, (1, 0, 0), 1),
        ({"tp_rank": 0, "tp_size": 2, "pp_rank": 1, "pp_size": 2, "dp_rank": None}, (0, 1, 0), 2),
        ({"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "dp_rank": 3}, (0, 0, 3), 3),
    ],
)
def test_rank_labels_come_from_the_engines_own_context(
    ranks: dict[str, Any], labels: tuple[int, int, int], process: int
):
    context = pytest.importorskip("sglang.srt.runtime_context")
    with context.get_parallel().override(**ranks):
        found_ranks = versions.rank_labels(None)
    assert (found_ranks.tp_rank, found_ranks.pp_rank, found_ranks.dp_rank) == labels
    assert found_ranks.process_index == process
