"""vLLM's KV cache groups and layouts: every byte of a slot is a strip's, and nobody else's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcanary_plugin.hooks.vllm import versions
from kvcanary_plugin.hooks.vllm.layouts import layer_sources
from kvcanary_plugin.hooks.vllm.pools import (
    BlockTable,
    GuardedCaches,
    UnsupportedLayout,
    guarded_caches,
)

BLOCKS = 3


class FullAttentionSpec(SimpleNamespace):
    """Recognised by its name, as vLLM's own."""


class SlidingWindowSpec(SimpleNamespace):
    pass


class MambaSpec(SimpleNamespace):
    pass


def attention_layer(cache: Any, *, isa: str | None = None) -> Any:
    layer = SimpleNamespace(kv_cache=cache)
    if isa is not None:
        layer.isa = isa
    return layer


def numbered(*shape: int) -> torch.Tensor:
    """A tensor in which every element is its own number in memory."""
    count = int(torch.tensor(shape).prod())
    return torch.arange(count, dtype=torch.int32).reshape(shape)


def packing_of(layer: Any) -> str | None:
    return getattr(layer, "isa", None)


def elements_of_slot(layer: Any, slot: int) -> list[int]:
    """What the sources of a layer read for ``slot``, element by element."""
    found: list[int] = []
    for source in layer_sources(layer, packing=packing_of(layer)):
        assert source.read_bytes == source.num_bytes_per_token
        row = source.tensor[slot // source.page_size].reshape(-1).view(torch.uint8)
        start = (slot % source.page_size) * source.num_bytes_per_token
        strip = row[start : start + source.num_bytes_per_token].clone()
        found += strip.view(torch.int32).tolist()
    return found


def assert_slots_own_their_elements(layer: Any, owned: dict[int, list[int]]) -> None:
    for slot, elements in owned.items():
        assert sorted(elements_of_slot(layer, slot)) == sorted(elements)


sizes = st.integers(1, 4)


@given(
    heads=sizes,
    tokens=st.integers(1, 8),
    size=sizes,
    layers=sizes,
    order=st.sampled_from(["BHNC", "BNHC", "LBHNC", "BLHNC"]),
)
def test_a_slot_owns_its_elements_in_every_order_of_memory(heads, tokens, size, layers, order):
    if order == "BHNC":
        cache = numbered(BLOCKS, heads, tokens, size)
    elif order == "BNHC":
        cache = numbered(BLOCKS, tokens, heads, size).transpose(1, 2)
    elif order == "LBHNC":
        cache = numbered(layers, BLOCKS, heads, tokens, size)[layers - 1]
    else:
        cache = numbered(BLOCKS, layers, heads, tokens, size)[:, layers - 1]
    assert_slots_own_their_elements(
        attention_layer(cache),
        {
            block * tokens + token: cache[block, :, token].flatten().tolist()
            for block in range(BLOCKS)
            for token in range(tokens)
        },
    )


@pytest.mark.parametrize("split_first", [True, False], ids=["K-and-V-first", "blocks-first"])
def test_k_and_v_apart_belong_to_the_same_slot(split_first):
    tokens, heads, size = 4, 2, 3
    if split_first:
        cache = numbered(2, BLOCKS + 1, tokens, heads, size)
        parts = cache
    else:
        cache = numbered(BLOCKS, 2, tokens, heads, size)
        parts = cache.transpose(0, 1)
    assert_slots_own_their_elements(
        attention_layer(cache),
        {
            block * tokens + token: parts[:, block, token].flatten().tolist()
            for block in range(BLOCKS)
            for token in range(tokens)
        },
    )


def test_a_latent_cache_has_one_strip_a_layer():
    cache = numbered(BLOCKS, 4, 5)
    layer = attention_layer(cache)
    assert len(list(layer_sources(layer))) == 1
    assert_slots_own_their_elements(layer, {6: cache[1, 2].tolist()})


@given(
    heads=sizes,
    tokens=st.sampled_from([1, 2, 32]),
    size=sizes,
    isa=st.sampled_from(["vec", "vec16"]),
)
def test_the_packed_k_of_a_slot_is_found_element_by_element(heads, tokens, size, isa):
    cache = numbered(BLOCKS, heads, tokens, 2 * size)
    owned: dict[int, list[int]] = {}
    for block in range(BLOCKS):
        for token in range(tokens):
            elements = []
            for head in range(heads):
                packed = cache[block, head].flatten()
                elements += [int(packed[d * tokens + token]) for d in range(size)]
                v = packed[size * tokens :].reshape(tokens, size)
                elements += v[token].tolist()
            owned[block * tokens + token] = elements
    assert_slots_own_their_elements(attention_layer(cache, isa=isa), owned)


def test_no_two_slots_share_a_byte_of_the_packed_layout():
    cache = numbered(BLOCKS, 2, 32, 8)
    layer = attention_layer(cache, isa="vec")
    every = [e for slot in range(BLOCKS * 32) for e in elements_of_slot(layer, slot)]
    assert sorted(every) == list(range(cache.numel()))


@pytest.mark.parametrize(
    ("cache", "isa"),
    [
        (torch.zeros(3, 2, 32, 8), "amx"),
        (torch.zeros(2, 3, 2, 32, 8), "vec"),
        (torch.zeros(3, 2, 4, 8).transpose(2, 3), None),
        (torch.zeros(3, 4, 2, 16)[..., :8].transpose(1, 2), None),
        (torch.zeros(3, 4), None),
        ([torch.zeros(3, 2, 4, 8), torch.zeros(1)], None),
    ],
    ids=[
        "amx",
        "packed apart",
        "inner stride",
        "gap between heads",
        "two dimensions",
        "list of tensors",
    ],
)
def test_a_layout_without_equal_steps_is_refused(cache, isa):
    with pytest.raises(UnsupportedLayout):
        list(layer_sources(attention_layer(cache, isa=isa), packing=isa))


def caches_of(
    groups: list[tuple[Any, list[str]]], layers: dict[str, Any], target: set[str] | None = None
) -> GuardedCaches:
    return guarded_caches(
        groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=names) for spec, names in groups],
        num_blocks=BLOCKS,
        tables=[
            BlockTable(table=torch.zeros((2, 8), dtype=torch.int32), page_size=4) for _ in groups
        ],
        layers=layers,
        is_target_layer=lambda layer: (
            target is None or any(layers[name] is layer for name in target)
        ),
        packing_of=packing_of,
    )


def test_groups_over_one_allocation_share_records_and_have_their_own_windows():
    cache = numbered(BLOCKS, 2, 4, 3)
    layers = {"a": attention_layer(cache), "b": attention_layer(cache)}
    caches = caches_of(
        [
            (FullAttentionSpec(block_size=4), ["a"]),
            (SlidingWindowSpec(block_size=4, sliding_window=64), ["b"]),
        ],
        layers,
    )
    full, swa = caches.groups
    assert (full.name, full.swa_window_size) == ("full", 0)
    # The window counts the token itself.
    assert (swa.name, swa.swa_window_size) == ("swa", 63)
    assert full.pool == swa.pool
    assert full.num_slots == swa.num_slots == BLOCKS * 4
    assert full.padding_row == -1
    assert not caches.unguarded


def test_groups_of_one_shape_have_the_same_strips_however_many_layers_they_have():
    one, two = numbered(BLOCKS, 2, 4, 3), numbered(BLOCKS, 2, 4, 3)
    caches = caches_of(
        [
            (FullAttentionSpec(block_size=4), ["a"]),
            (SlidingWindowSpec(block_size=4, sliding_window=64), ["b", "c"]),
        ],
        {"a": attention_layer(two), "b": attention_layer(one), "c": attention_layer(two)},
    )
    full, swa = ([s.tensor.data_ptr() for s in group.sources] for group in caches.groups)
    assert full == swa
    assert len(full) == 4  # two layers, two heads
    assert all(group.freed_slots_keep_bytes for group in caches.groups)


def test_a_recurrent_state_in_the_same_blocks_means_that_freed_blocks_change():
    caches = caches_of(
        [(FullAttentionSpec(block_size=4), ["a"]), (MambaSpec(block_size=4), ["m"])],
        {"a": attention_layer(numbered(BLOCKS, 1, 4, 3)), "m": attention_layer([])},
    )
    assert not caches.groups[0].freed_slots_keep_bytes


def test_blocks_of_another_size_are_another_numbering():
    layers = {
        "a": attention_layer(numbered(BLOCKS, 1, 4, 3)),
        "b": attention_layer(numbered(BLOCKS, 1, 8, 3)),
    }
    caches = caches_of(
        [
            (FullAttentionSpec(block_size=4), ["a"]),
            (SlidingWindowSpec(block_size=8, sliding_window=64), ["b"]),
        ],
        layers,
    )
    assert caches.groups[0].pool != caches.groups[1].pool
    assert caches.block_sizes == (4, 8)
    assert not any(group.freed_slots_keep_bytes for group in caches.groups)


def test_layers_that_share_their_cache_count_once():
    layer = attention_layer(numbered(BLOCKS, 1, 4, 3))
    caches = caches_of([(FullAttentionSpec(block_size=4), ["a", "b"])], {"a": layer, "b": layer})
    assert len(caches.groups[0].sources) == 1


def test_kernel_blocks_smaller_than_the_schedulers_number_the_same_slots():
    cache = numbered(BLOCKS * 2, 1, 2, 3)  # two kernel blocks a block of 4
    caches = caches_of([(FullAttentionSpec(block_size=4), ["a"])], {"a": attention_layer(cache)})
    (source,) = caches.groups[0].sources
    assert source.page_size == 2
    assert caches.groups[0].num_slots == BLOCKS * 4


def test_recurrent_state_is_shown_as_unguarded_with_the_reason():
    layers = {"a": attention_layer(numbered(BLOCKS, 1, 4, 3)), "m": attention_layer([])}
    caches = caches_of(
        [(MambaSpec(block_size=4), ["m"]), (FullAttentionSpec(block_size=4), ["a"])], layers
    )
    assert [(group.name, group.reason) for group in caches.unguarded] == [
        ("mamba", "a recurrent state has no slots")
    ]
    assert caches.group_ids == (1,)


def test_draft_layers_are_left_out_and_shown():
    layers = {name: attention_layer(numbered(BLOCKS, 1, 4, 3)) for name in ("target", "draft")}
    caches = caches_of(
        [(FullAttentionSpec(block_size=4), ["target", "draft"])], layers, target={"target"}
    )
    (source,) = caches.groups[0].sources
    assert source.tensor.data_ptr() == layers["target"].kv_cache.data_ptr()
    assert [group.name for group in caches.unguarded] == ["draft"]


def test_bytes_without_an_adapter_leave_tokens_and_positions_guarded():
    layers = {"a": attention_layer(torch.zeros(3, 2, 4, 8, dtype=torch.bfloat16), isa="amx")}
    caches = caches_of([(FullAttentionSpec(block_size=4), ["a"])], layers)
    assert caches.groups[0].sources == ()
    (unguarded,) = caches.unguarded
    assert unguarded.name == "full_bytes"
    assert "its bytes are not" in unguarded.reason


def test_a_cache_smaller_than_the_group_is_not_folded():
    layers = {"a": attention_layer(numbered(BLOCKS - 1, 1, 4, 3))}
    caches = caches_of([(FullAttentionSpec(block_size=4), ["a"])], layers)
    assert caches.groups[0].sources == ()
    assert "holds 8 slots and the group has 12" in caches.unguarded[0].reason


def test_several_groups_of_a_kind_are_numbered():
    layers = {name: attention_layer(numbered(BLOCKS, 1, 4, 3)) for name in "abc"}
    window = {"block_size": 4, "sliding_window": 8}
    caches = caches_of([(SlidingWindowSpec(**window), [name]) for name in "abc"], layers)
    assert [group.name for group in caches.groups] == ["swa", "swa_2", "swa_3"]


def test_layers_of_one_type_and_different_windows_keep_the_smallest_common_one():
    layers = {name: attention_layer(numbered(BLOCKS, 1, 4, 3)) for name in "ab"}
    spec = SimpleNamespace(
        block_size=4,
        kv_cache_specs={
            "a": SlidingWindowSpec(block_size=4, sliding_window=8),
            "b": FullAttentionSpec(block_size=4),
        },
    )
    caches = caches_of([(spec, ["a", "b"])], layers)
    assert (caches.groups[0].name, caches.groups[0].swa_window_size) == ("mixed", 0)


@pytest.mark.parametrize(
    ("layer", "packing"),
    [
        (SimpleNamespace(kv_cache=torch.zeros(3, 2, 4, 8), isa="vec"), "vec"),
        (
            SimpleNamespace(kv_cache=torch.zeros(3, 2, 4, 8), impl=SimpleNamespace(isa="amx")),
            "amx",
        ),
        (SimpleNamespace(kv_cache=torch.zeros(3, 2, 4, 8)), "an unnamed instruction set"),
        (
            SimpleNamespace(kv_cache=[torch.zeros(2, 3, 2, 4, 8)], impl=SimpleNamespace(isa="vec")),
            "vec",
        ),
        (SimpleNamespace(kv_cache=torch.zeros(3, 4, 8)), None),
        (SimpleNamespace(kv_cache=[]), None),
        (SimpleNamespace(kv_cache=torch.zeros(3, 2, 4, 8, device="meta")), None),
    ],
    ids=["0.32", "0.26", "unknown", "0.20", "latent", "none", "not a CPU"],
)
def test_what_the_cpu_backend_packs_is_never_read_by_its_strides(layer, packing):
    assert versions.packing_of(layer) == packing
