"""Python and C++ name the same numbers and lay out the same structs."""

from __future__ import annotations

import re
from dataclasses import fields
from enum import IntEnum, IntFlag

import pytest
import torch

from kvcanary_plugin.kernels import consts
from kvcanary_plugin.kernels.build import SOURCE_DIR
from kvcanary_plugin.kernels.consts import EventKind, FailReason, SlotState, ViolationField
from kvcanary_plugin.kernels.context import SlotTable
from kvcanary_plugin.kernels.packing import packed
from tests.kernels import scenes

HASH_H = (SOURCE_DIR / "hash.h").read_text()
RECORD_H = (SOURCE_DIR / "record.h").read_text()
TABLE_H = (SOURCE_DIR / "table.h").read_text()


def constant(header: str, name: str) -> str:
    match = re.search(rf"constexpr \w+ {name} = (.+?);", header)
    assert match is not None, name
    return match[1].removesuffix("ULL")


def cpp_enum(name: str) -> dict[str, int]:
    body = re.search(rf"enum {name} : \w+ \{{(.*?)\}};", RECORD_H, re.DOTALL)
    assert body is not None
    pairs = re.findall(r"k(\w+) = (\d+(?: << \d+)?)", body[1])
    return {key: eval(value) for key, value in pairs}


def struct_fields(name: str) -> list[str]:
    body = re.search(rf"struct {name} \{{(.*?)\}};", RECORD_H, re.DOTALL)
    assert body is not None
    return re.findall(r"u?int64_t (\w+);", body[1])


def camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


@pytest.mark.parametrize(
    ("header", "name", "value"),
    [
        (HASH_H, "kChainAnchor", consts.CANARY_CHAIN_ANCHOR),
        (HASH_H, "kGolden", consts.GOLDEN),
        (RECORD_H, "kPaddingSlot", consts.PADDING_SLOT),
        (RECORD_H, "kChainHead", consts.CHAIN_HEAD),
        (RECORD_H, "kUnknown", consts.UNKNOWN),
        (RECORD_H, "kPartialReadBytes", consts.PARTIAL_READ_BYTES),
    ],
)
def test_constants_agree(header: str, name: str, value: int) -> None:
    assert int(constant(header, name), 0) == value


def test_out_of_table_is_the_largest_int64_on_both_sides() -> None:
    assert constant(TABLE_H, "kOutOfTable") == "INT64_MAX"
    assert torch.iinfo(torch.int64).max == consts.OUT_OF_TABLE


@pytest.mark.parametrize(
    ("python", "cpp_name", "prefix"),
    [
        (FailReason, "FailReason", ""),
        (SlotState, "SlotState", ""),
        (EventKind, "EventKind", "Event"),
    ],
)
def test_enumerations_agree(
    python: type[IntEnum] | type[IntFlag], cpp_name: str, prefix: str
) -> None:
    expected = {prefix + camel(name): int(member) for name, member in python.__members__.items()}
    assert cpp_enum(cpp_name) == expected


def test_record_has_the_four_fields_in_order() -> None:
    order = struct_fields("Record")
    assert order == ["token", "position", "prev_hash", "real_kv_hash"]
    indices = [getattr(consts, f"FIELD_{name.upper()}") for name in order]
    assert indices == list(range(consts.RECORD_FIELDS))


def test_violation_row_columns_agree() -> None:
    assert struct_fields("ViolationRow") == [field.name.lower() for field in ViolationField]


def test_packed_context_fills_the_words_of_the_struct_in_order() -> None:
    table = SlotTable.allocate(num_slots=4, device=scenes.CPU, tracks_allocation=True)
    context = scenes.make_context(num_slots=4, stride=48, slot_table=table, kernel_kind=258)
    words = dict(zip(struct_fields("LaunchContext"), packed(context).launch.tolist(), strict=True))
    assert words == {
        "records": context.canary_buf.data_ptr(),
        "num_slots": 4,
        "record_stride": 48,
        "violation_ring": context.violation_ring.data_ptr(),
        "ring_capacity": 64,
        "violation_write_index": context.violation_write_index.data_ptr(),
        "slot_run_counter": context.slot_run_counter.data_ptr(),
        "kernel_run_counter": context.kernel_run_counter.data_ptr(),
        "counter_mirror": 0,
        "chain_position_assert": context.enable_chain_position_assert.data_ptr(),
        "slot_state": table.state.data_ptr(),
        "owner_uid": table.owner_uid.data_ptr(),
        "writer_uid": table.writer_uid.data_ptr(),
        "writer_step": table.writer_step.data_ptr(),
        "tracks_allocation": 1,
        "sources": 0,
        "num_sources": 0,
        "hash_mode": 0,
        "kernel_kind": 258,
        "device_index": -1,
    }


def test_context_is_packed_once() -> None:
    context = scenes.make_context()
    assert packed(context) is packed(context)


def test_slot_table_costs_28_bytes_a_slot() -> None:
    table = SlotTable.allocate(num_slots=10, device=scenes.CPU, tracks_allocation=False)
    columns = [getattr(table, field.name) for field in fields(table)]
    sizes = [column.nbytes for column in columns if isinstance(column, torch.Tensor)]
    assert sum(sizes) == 280
