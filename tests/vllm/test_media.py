"""Placeholders of images carry the image: in the inputs and in the host's tokens alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvcanary_plugin.hooks.vllm.media import NO_MEDIA, Media, MediaPart, marked_inputs, media_of
from kvcanary_plugin.hooks.vllm.requests import RequestBook
from kvcanary_plugin.violations import RequestNames

PLACEHOLDER = 7
PROMPT = np.array([1, 2, PLACEHOLDER, PLACEHOLDER, PLACEHOLDER, 3, 4], dtype=np.int64)


def feature(identifier: str, offset: int = 2, length: int = 3) -> Any:
    return SimpleNamespace(
        identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length)
    )


def media(*features: Any, prompt_len: int = 7) -> Media:
    return media_of(features, prompt_len=prompt_len)


def test_only_the_placeholders_differ_between_two_images():
    cat, dog = media(feature("cat")).marked(PROMPT), media(feature("dog")).marked(PROMPT)
    assert np.flatnonzero(cat != dog).tolist() == [2, 3, 4]
    assert np.flatnonzero(cat != PROMPT).tolist() == [2, 3, 4]
    assert cat.min() >= 0
    assert cat.max() < 2**31


def test_the_same_image_is_the_same_and_another_token_under_it_is_seen():
    again = media(feature("cat")).marked(PROMPT)
    assert (media(feature("cat")).marked(PROMPT) == again).all()
    assert media(feature("cat")).marked(PROMPT + (PROMPT == 7))[2] != again[2]


def test_a_request_without_items_is_left_as_it_is():
    assert media_of(None, prompt_len=7) is NO_MEDIA
    assert NO_MEDIA.marked(PROMPT) is PROMPT
    inputs = torch.arange(4, dtype=torch.int32)
    part = MediaPart(media=NO_MEDIA, row=0, start=0, end=4)
    assert marked_inputs(inputs, [part], starts=torch.tensor([0, 4])) is inputs


def test_items_end_with_the_prompt():
    # Encoder-decoder models count positions of the encoder.
    marks = media(feature("sound", offset=0, length=1500)).marks(0, 9)
    assert np.flatnonzero(marks).tolist() == list(range(7))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_chunks_of_several_requests_are_marked_as_the_host_marks_them(dtype):
    cat, two = media(feature("cat")), media(feature("a", 0, 2), feature("b", 1, 3))
    # Row 0 decodes, row 1 computes [3, 6) of its prompt, row 2 [0, 4).
    inputs = torch.tensor([9, *PROMPT[3:6], *PROMPT[:4], 0, 0], dtype=dtype)
    parts = [
        MediaPart(media=cat, row=1, start=3, end=6),
        MediaPart(media=two, row=2, start=0, end=4),
    ]
    marked = marked_inputs(inputs, parts, starts=torch.tensor([0, 1, 4, 8]))
    assert marked.dtype == dtype
    assert marked.tolist() == [
        9,
        *cat.marked(PROMPT)[3:6].tolist(),
        *two.marked(PROMPT)[:4].tolist(),
        0,
        0,
    ]


# --- the engine's own objects ---------------------------------------------------------------------


def engine_request(name: str, tokens: list[int], **how: Any) -> Any:
    pytest.importorskip("vllm")
    from vllm import SamplingParams
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.v1.request import Request

    image = how.pop("image", None)
    features = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=image,
            mm_position=PlaceholderRange(offset=2, length=3),
        )
    ]
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=4),
        pooling_params=None,
        mm_features=features if image is not None else None,
        **how,
    )


def known_by_the_worker(request: Any) -> Any:
    """What the worker's book knows of a request as vLLM's scheduler sends it."""
    from vllm.v1.core.sched.output import NewRequestData

    from kvcanary_plugin.hooks.vllm import plugin

    plugin.register()
    admitted = NewRequestData.from_request(request, ([1],), request.prompt_token_ids)
    book = RequestBook(
        names=RequestNames(), device=torch.device("cpu"), max_requests=2, keeps_tokens=True
    )
    book.scheduled(SimpleNamespace(finished_req_ids=set(), scheduled_new_reqs=[admitted]))
    batch, _ = book.batch_of([request.request_id])
    return batch.requests[0]


def lora(name: str, path: str = "/adapters/x") -> Any:
    pytest.importorskip("vllm")
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=name, lora_int_id=1, lora_path=path)


@pytest.mark.parametrize(
    ("one", "another"),
    [
        ({}, {"image": "cat"}),
        ({"image": "cat"}, {"image": "dog"}),
        ({}, {"cache_salt": "tenant"}),
        ({"cache_salt": "tenant"}, {"cache_salt": "another"}),
        ({}, {"lora_request": "x"}),
        ({"lora_request": "x"}, {"lora_request": "y"}),
        ({"lora_request": "x"}, {"lora_request": "x", "cache_salt": "x"}),
        ({"image": "cat"}, {"image": "cat"}),
        ({"cache_salt": "tenant"}, {"cache_salt": "tenant"}),
        ({"lora_request": "x"}, {"lora_request": "x"}),
    ],
    ids=str,
)
def test_two_requests_share_a_chain_exactly_where_vllm_lets_them_share_blocks(one, another):
    pytest.importorskip("vllm")
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    from kvcanary_plugin.kernels import chain_hash

    requests = []
    for name, how in (("one", one), ("another", another)):
        how = dict(how)
        if "lora_request" in how:
            how["lora_request"] = lora(how["lora_request"])
        requests.append(engine_request(name, PROMPT.tolist(), **how))
    known = [known_by_the_worker(request) for request in requests]
    for end in range(1, len(PROMPT) + 1):
        # vLLM's keys of a block [0, end), had it that size, and the chain behind the same tokens.
        keys = [generate_block_hash_extra_keys(request, 0, end, 0)[0] for request in requests]
        chains = [
            chain_hash(request.media.marked(PROMPT)[:end], identity_key=request.key)
            for request in known
        ]
        assert (keys[0] == keys[1]) == (chains[0] == chains[1]), end


def test_the_scheduler_and_the_worker_give_a_request_the_same_key():
    from kvcanary_plugin.hooks.vllm.requests import key_of_request

    request = engine_request("a", [1, 2, 3], cache_salt="tenant", lora_request=lora("x"))
    assert known_by_the_worker(request).key == key_of_request(request) != 0
