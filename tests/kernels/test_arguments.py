"""Every bad argument is a ValueError that names it, whatever implementation runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvcanary_plugin.kernels import (
    RealKvHashMode,
    RealKvSource,
    SlotTable,
    VerifyOrWriteContext,
    VerifyPlan,
    WritePlan,
    allocate_records,
    concatenate_integers,
    launch_canary_plan_kernels,
    launch_canary_prepare_kernel,
    launch_canary_scrub_kernel,
    launch_canary_seal_kernel,
    launch_canary_table_verify_kernel,
    launch_canary_verify_kernel,
    launch_canary_write_kernel,
    load_kernels,
    translate_out_cache_loc,
)
from kvcanary_plugin.kernels.backend import kernels_for
from kvcanary_plugin.kernels.packing import packed
from tests.kernels import scenes

Change = Callable[[torch.Tensor], torch.Tensor]


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, not contiguous."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


def as_float(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float()


def as_int16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.short()


def one_more(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor[:1]])


def as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[None]


def as_int32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.int()


def as_int64(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.long()


# What every vector of a launch refuses, and what its message says about it.
ALWAYS_WRONG = [
    (strided, "must be contiguous"),
    (on_meta, "must be on the records' device cpu, got meta"),
    (as_float, "must be int"),
    (as_int16, "must be int"),
    (as_matrix, "must have one dimension"),
]
WRONG_SIZE = [(one_more, "must have")]
INT64_ONLY = [(as_int32, "must be int64")]
INT32_ONLY = [(as_int64, "must be int32")]


def write_arguments() -> dict[str, Any]:
    vector = torch.arange(1, 4)
    return {
        "context": scenes.make_context(),
        "plan": scenes.make_write_plan(lengths=[2, 1]),
        "input_ids": vector,
        "positions": vector.clone(),
        "out_cache_loc": vector.clone(),
        "enable_write_input_assert": True,
        "expected_input_tokens": vector.clone(),
        "expected_input_positions": vector.clone(),
    }


def verify_arguments() -> dict[str, Any]:
    plan = scenes.make_verify_plan([(1, 2, 3, -1), (2, 3, 4, 1)], uids=[1, 2], keys=[0, 0])
    plan = dataclasses.replace(plan, verify_batch_rows=torch.arange(2))
    return {
        "context": scenes.make_context(),
        "plan": plan,
        "check_verify_expected_token": True,
    }


def full_reads() -> Any:
    return scenes.make_reads(
        [[1, 2, 3], [4, 5, 6]],
        [2, 3],
        full_to_swa_index_mapping=torch.arange(10),
        identity_keys=torch.zeros(2, dtype=torch.int64),
        expected_tokens=torch.zeros(2, 3, dtype=torch.int64),
        expected_valid_lens=torch.ones(2, dtype=torch.int64),
        prefix_hashes=torch.zeros(2, dtype=torch.int64),
        prefix_hash_valid=torch.zeros(2, dtype=torch.int32),
    )


def table_verify_arguments() -> dict[str, Any]:
    return {"context": scenes.make_context(), "reads": full_reads(), "step": 1}


def prepare_arguments() -> dict[str, Any]:
    return {
        "context": scenes.make_context(),
        "reads": full_reads(),
        "write_plan_out": scenes.make_write_plan(lengths=[1, 1]),
        "out_cache_loc": torch.arange(2),
        "step": 1,
    }


def plan_arguments() -> dict[str, Any]:
    verify_plan = VerifyPlan.allocate(verify_capacity=9, device="cpu")
    reads = full_reads()
    return {
        "verify_plan_out": verify_plan,
        "write_plan_out": scenes.make_write_plan(lengths=[1, 1]),
        "req_pool_indices": reads.request_rows,
        "prefix_lens": reads.prefix_lens,
        "extend_seq_lens": reads.extend_lens,
        "req_to_token": reads.page_table,
        "swa_window_size": 0,
        "full_to_swa_index_mapping": reads.full_to_swa_index_mapping,
        "verify_capacity": 9,
        "req_to_verify_expected_tokens": reads.expected_tokens,
        "req_to_verify_expected_tokens_valid_lens": reads.expected_valid_lens,
    }


def seal_arguments() -> dict[str, Any]:
    return {
        "context": scenes.make_context(),
        "plan": scenes.make_write_plan(lengths=[2]),
        "out_cache_loc": torch.arange(2),
        "step": 1,
    }


def scrub_arguments() -> dict[str, Any]:
    return {
        "context": scenes.make_context(),
        "slots": torch.arange(3),
        "num_valid": torch.ones(1, dtype=torch.int32),
        "step": 1,
    }


def translate_arguments() -> dict[str, Any]:
    return {
        "out_cache_loc": torch.arange(3),
        "full_to_swa_index_mapping": torch.arange(5),
        "output": torch.arange(3),
    }


def concatenate_arguments() -> dict[str, Any]:
    return {"arrays": (torch.arange(3), torch.arange(2)), "output": torch.arange(5)}


def with_tensor(arguments: dict[str, Any], path: str, change: Change) -> dict[str, Any]:
    """The arguments with the tensor at ``path`` ("name" or "name.field") changed."""
    name, _, field = path.partition(".")
    if not field:
        return arguments | {name: change(arguments[name])}
    owner = arguments[name]
    return arguments | {name: dataclasses.replace(owner, **{field: change(getattr(owner, field))})}


# ---- per-call tensors ----------------------------------------------------------------------------

ENGINE_INTEGERS = [*ALWAYS_WRONG, *WRONG_SIZE]
INT64_COLUMN = [*ENGINE_INTEGERS, *INT64_ONLY]
# One entry is contiguous whatever its stride.
INT32_SCALAR = [*ENGINE_INTEGERS[1:], *INT32_ONLY]
INT32_COLUMN = [*ENGINE_INTEGERS, *INT32_ONLY]

# launch, its arguments, path of a tensor, name in the message, what it refuses
TENSORS: list[tuple[Callable[..., None], Callable[[], dict[str, Any]], str, str, Any]] = [
    *(
        (launch_canary_write_kernel, write_arguments, path, path, wrong)
        for path, wrong in (
            ("plan.write_offsets", INT64_COLUMN),
            ("plan.write_seed_slot_indices", [*ALWAYS_WRONG, *INT64_ONLY]),
            ("plan.write_num_valid_reqs", INT32_SCALAR),
            ("plan.write_request_uids", INT64_COLUMN),
            ("plan.write_identity_keys", INT64_COLUMN),
            ("input_ids", ALWAYS_WRONG),
            ("positions", ENGINE_INTEGERS),
            ("out_cache_loc", ENGINE_INTEGERS),
            ("expected_input_tokens", ENGINE_INTEGERS),
            ("expected_input_positions", ENGINE_INTEGERS),
        )
    ),
    *(
        (launch_canary_verify_kernel, verify_arguments, path, path, wrong)
        for path, wrong in (
            ("plan.verify_slot_indices", [*ALWAYS_WRONG, *INT64_ONLY]),
            ("plan.verify_expected_tokens", INT64_COLUMN),
            ("plan.verify_expected_positions", INT64_COLUMN),
            ("plan.verify_prev_slot_indices", INT64_COLUMN),
            ("plan.verify_num_valid", INT32_SCALAR),
            ("plan.enable", INT32_SCALAR),
            ("plan.verify_request_uids", INT64_COLUMN),
            ("plan.verify_batch_rows", INT64_COLUMN),
            ("plan.verify_identity_keys", INT64_COLUMN),
        )
    ),
    *(
        (launch, arguments, f"reads.{field}", field, wrong)
        for launch, arguments, fields in (
            (
                launch_canary_table_verify_kernel,
                table_verify_arguments,
                (
                    ("request_rows", ALWAYS_WRONG),
                    ("request_uids", INT64_COLUMN),
                    ("prefix_lens", ENGINE_INTEGERS),
                    ("full_to_swa_index_mapping", ALWAYS_WRONG),
                    ("identity_keys", INT64_COLUMN),
                    ("expected_valid_lens", ENGINE_INTEGERS),
                    ("prefix_hashes", INT64_COLUMN),
                    ("prefix_hash_valid", INT32_COLUMN),
                ),
            ),
            (
                launch_canary_prepare_kernel,
                prepare_arguments,
                (
                    ("request_uids", INT64_COLUMN),
                    ("prefix_lens", ENGINE_INTEGERS),
                    ("extend_lens", ENGINE_INTEGERS),
                    ("full_to_swa_index_mapping", ALWAYS_WRONG),
                    ("identity_keys", INT64_COLUMN),
                ),
            ),
        )
        for field, wrong in fields
    ),
    (
        launch_canary_prepare_kernel,
        prepare_arguments,
        "write_plan_out.write_offsets",
        "plan.write_offsets",
        INT64_COLUMN,
    ),
    (
        launch_canary_prepare_kernel,
        prepare_arguments,
        "out_cache_loc",
        "out_cache_loc",
        ALWAYS_WRONG,
    ),
    *(
        (launch_canary_plan_kernels, plan_arguments, path, name, wrong)
        for path, name, wrong in (
            ("verify_plan_out.verify_prev_slot_indices", "plan.verify_prev", INT64_COLUMN),
            ("verify_plan_out.enable", "plan.enable", INT32_SCALAR),
            ("write_plan_out.write_offsets", "plan.write_offsets", INT64_COLUMN),
            ("prefix_lens", "prefix_lens", ENGINE_INTEGERS),
            ("extend_seq_lens", "extend_seq_lens", ENGINE_INTEGERS),
            ("full_to_swa_index_mapping", "full_to_swa_index_mapping", ALWAYS_WRONG),
            ("req_to_verify_expected_tokens_valid_lens", "valid_lens", ENGINE_INTEGERS),
        )
    ),
    (launch_canary_seal_kernel, seal_arguments, "out_cache_loc", "out_cache_loc", ALWAYS_WRONG),
    (
        launch_canary_seal_kernel,
        seal_arguments,
        "plan.write_num_valid_reqs",
        "plan.write_num_valid_reqs",
        INT32_SCALAR,
    ),
    (launch_canary_scrub_kernel, scrub_arguments, "slots", "slots", [*ALWAYS_WRONG, *INT64_ONLY]),
    (launch_canary_scrub_kernel, scrub_arguments, "num_valid", "num_valid", INT32_SCALAR),
    (
        translate_out_cache_loc,
        translate_arguments,
        "out_cache_loc",
        "out_cache_loc",
        ENGINE_INTEGERS,
    ),
    (
        translate_out_cache_loc,
        translate_arguments,
        "full_to_swa_index_mapping",
        "full_to_swa_index_mapping",
        ALWAYS_WRONG,
    ),
]
CASES = [
    pytest.param(
        *(launch, arguments, path, name, change, message),
        id=f"{arguments.__name__}-{path}-{change.__name__}",
    )
    for launch, arguments, path, name, wrong in TENSORS
    for change, message in wrong
]


@pytest.mark.parametrize(("launch", "arguments", "path", "name", "change", "message"), CASES)
def test_wrong_tensor_is_refused_by_name(
    implementation: str,
    launch: Callable[..., None],
    arguments: Callable[[], dict[str, Any]],
    path: str,
    name: str,
    change: Change,
    message: str,
) -> None:
    launch(**arguments())
    with pytest.raises(ValueError, match=f"^kvcanary: .*{name}.* {message}"):
        launch(**with_tensor(arguments(), path, change))


@pytest.mark.parametrize(
    ("launch", "arguments", "path", "name"),
    [
        (
            launch_canary_table_verify_kernel,
            table_verify_arguments,
            "reads.page_table",
            "page_table",
        ),
        (
            launch_canary_table_verify_kernel,
            table_verify_arguments,
            "reads.expected_tokens",
            "expected_tokens",
        ),
        (launch_canary_prepare_kernel, prepare_arguments, "reads.page_table", "page_table"),
        (
            launch_canary_plan_kernels,
            plan_arguments,
            "req_to_verify_expected_tokens",
            "req_to_verify_expected_tokens",
        ),
    ],
)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (strided, "must have contiguous rows"),
        (lambda tensor: tensor[0], "must have two dimensions"),
        (as_float, "must be int32 or int64"),
        (on_meta, "must be on the records' device cpu, got meta"),
    ],
    ids=["columns strided", "one dimension", "float", "meta"],
)
def test_wrong_table_is_refused_by_name(
    implementation: str,
    launch: Callable[..., None],
    arguments: Callable[[], dict[str, Any]],
    path: str,
    name: str,
    change: Change,
    message: str,
) -> None:
    with pytest.raises(ValueError, match=f"^kvcanary: {name} {message}"):
        launch(**with_tensor(arguments(), path, change))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("page_size", 0, "page_size must be at least 1, got 0"),
        ("swa_window_size", -1, "swa_window_size must be at least 0, got -1"),
        ("max_prefix_len", -1, "max_prefix_len must be at least 0, got -1"),
        ("expected_valid_lens", None, "expected_tokens and expected_valid_lens must be given"),
        ("prefix_hashes", None, "prefix_hashes and prefix_hash_valid must be given together"),
        (
            "full_to_swa_index_mapping",
            torch.zeros(0, dtype=torch.int64),
            "full_to_swa_index_mapping size must be at least 1, got 0",
        ),
    ],
)
def test_wrong_reads_are_refused(
    implementation: str, field: str, value: object, message: str
) -> None:
    arguments = table_verify_arguments()
    arguments["reads"] = dataclasses.replace(arguments["reads"], **{field: value})
    with pytest.raises(ValueError, match=f"^kvcanary: {message}"):
        launch_canary_table_verify_kernel(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"verify_capacity": 8}, "verify_capacity must equal the plan's capacity 9, got 8"),
        ({"page_size": 0}, "page_size must be at least 1"),
        ({"req_to_verify_expected_tokens": None}, "req_to_verify_expected_tokens and .* together"),
    ],
)
def test_wrong_plan_arguments_are_refused(
    implementation: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^kvcanary: {message}"):
        launch_canary_plan_kernels(**(plan_arguments() | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output": torch.arange(4)}, "output must have 5 entries like all arrays together, got 4"),
        ({"output": torch.arange(6)}, "output must have 5 entries like all arrays together, got 6"),
        ({"output": torch.zeros(5)}, "output must be int64, got torch.float32"),
        ({"arrays": (torch.arange(3), torch.zeros(2))}, "arrays\\[1\\] must be int32 or int64"),
        ({"arrays": (torch.arange(6)[::2], torch.arange(2))}, "arrays\\[0\\] must be contiguous"),
    ],
)
def test_wrong_arrays_are_refused(
    implementation: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^kvcanary: {message}"):
        concatenate_integers(**(concatenate_arguments() | change))


@pytest.mark.parametrize(
    ("launch", "arguments"),
    [
        (launch_canary_plan_kernels, plan_arguments),
        (launch_canary_prepare_kernel, prepare_arguments),
    ],
)
def test_more_requests_than_the_write_plan_holds_are_refused(
    implementation: str, launch: Callable[..., None], arguments: Callable[[], dict[str, Any]]
) -> None:
    too_small = {"write_plan_out": scenes.make_write_plan(lengths=[1])}
    with pytest.raises(ValueError, match="2 requests does not fit into a write plan for 1"):
        launch(**(arguments() | too_small))


@pytest.mark.parametrize(
    ("asserts", "tokens", "positions", "message"),
    [
        (True, None, None, "are required when enable_write_input_assert=True, got None and None"),
        (True, 1, None, "are required when .*, got a tensor and None"),
        (True, None, 1, "are required when .*, got None and a tensor"),
        (
            False,
            1,
            1,
            "must be None when enable_write_input_assert=False, got a tensor and a tensor",
        ),
        (False, None, 1, "must be None when .*, got None and a tensor"),
    ],
)
def test_expected_inputs_go_with_the_switch(
    implementation: str, asserts: bool, tokens: int | None, positions: int | None, message: str
) -> None:
    arguments = write_arguments() | {"enable_write_input_assert": asserts}
    if tokens is None:
        arguments["expected_input_tokens"] = None
    if positions is None:
        arguments["expected_input_positions"] = None
    with pytest.raises(ValueError, match=message):
        launch_canary_write_kernel(**arguments)


# ---- the context ---------------------------------------------------------------------------------

GOOD = RealKvSource(
    tensor=torch.zeros(8, 4, 16, dtype=torch.uint8),
    page_size=4,
    num_bytes_per_token=16,
    read_bytes=16,
)


def with_source(**fields: Any) -> dict[str, Any]:
    return {"real_kv_sources": (GOOD, dataclasses.replace(GOOD, **fields))}


def with_slot_table(**fields: Any) -> dict[str, Any]:
    table = SlotTable.allocate(num_slots=32, device=scenes.CPU, tracks_allocation=True)
    return {"slot_table": dataclasses.replace(table, **fields)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"canary_buf": torch.zeros(32, 32)}, "canary_buf must be uint8, got torch.float32"),
        ({"canary_buf": torch.zeros(1024, dtype=torch.uint8)}, "canary_buf must have shape"),
        ({"canary_buf": torch.zeros(0, 32, dtype=torch.uint8)}, "canary_buf must have shape"),
        ({"canary_buf": torch.zeros(32, 64, dtype=torch.uint8)[:, :32]}, "canary_buf must be cont"),
        (
            {"canary_buf": torch.zeros(32, 16, dtype=torch.uint8)},
            "stride must be at least 32",
        ),
        (
            {"canary_buf": torch.zeros(32, 40, dtype=torch.uint8)},
            "stride must .* of 16, got 40",
        ),
        (
            {"canary_buf": torch.zeros(32 * 32 + 1, dtype=torch.uint8)[1:].view(32, 32)},
            "canary_buf must start at a multiple of 16",
        ),
        ({"canary_buf": torch.zeros(32, 32, device="meta")}, "canary_buf must be on a CPU or CUDA"),
        (
            {"violation_ring": torch.zeros(0, 16, dtype=torch.int64)},
            r"violation_ring must have shape \[capacity >= 1, 16\], got \[0, 16\]",
        ),
        (
            {"violation_ring": torch.zeros(4, 15, dtype=torch.int64)},
            "violation_ring must have shape",
        ),
        ({"violation_ring": torch.zeros(4, 16)}, "violation_ring must be int64"),
        (
            {"violation_ring": torch.zeros(16, 4, dtype=torch.int64).T},
            "violation_ring must be contiguous",
        ),
        (
            {"violation_ring": torch.zeros(4, 32, dtype=torch.int64)[:, :16]},
            "violation_ring must be contiguous",
        ),
        (
            {"violation_ring": torch.zeros(4, 16, dtype=torch.int64, device="meta")},
            "violation_ring must be on the records' device cpu, got meta",
        ),
        (
            {"violation_write_index": torch.zeros(1, dtype=torch.int64)},
            "violation_write_index must be int32",
        ),
        ({"slot_run_counter": torch.zeros(2, dtype=torch.int64)}, "slot_run_counter must have 1"),
        (
            {"kernel_run_counter": torch.zeros(1, dtype=torch.int32)},
            "kernel_run_counter must be int64",
        ),
        (
            {"enable_chain_position_assert": torch.zeros(1, dtype=torch.int32, device="meta")},
            "enable_chain_position_assert must be on the records' device cpu, got meta",
        ),
        (
            {"counter_mirror": torch.zeros(2, dtype=torch.int64)},
            "counter_mirror must be None for records on CPU",
        ),
        (
            with_slot_table(state=torch.zeros(31, dtype=torch.int32)),
            "slot_table.state must have 32 entries like canary_buf, got 31",
        ),
        (
            with_slot_table(writer_step=torch.zeros(32, dtype=torch.int32)),
            "slot_table.writer_step must be int64",
        ),
        (with_source(page_size=0), r"real_kv_sources\[1\].page_size must be at least 1, got 0"),
        (
            with_source(num_bytes_per_token=0),
            r"real_kv_sources\[1\].num_bytes_per_token must be at least 1",
        ),
        (with_source(read_bytes=0), r"real_kv_sources\[1\].read_bytes must be at least 1"),
        (with_source(read_bytes=17), "read_bytes must be at most num_bytes_per_token 16, got 17"),
        (
            with_source(page_size=5),
            "rows of at least page_size \\* num_bytes_per_token = 80 bytes, got 64",
        ),
        (with_source(tensor=GOOD.tensor[:7]), "cover the 32 slots of canary_buf, got 28 slots"),
        (with_source(tensor=GOOD.tensor[:0]), "must have at least one row"),
        (with_source(tensor=torch.tensor(1.0)), "must have at least one row"),
        (with_source(tensor=torch.zeros(8, 16, 4).mT), "contiguous behind its first dimension"),
        (
            with_source(tensor=torch.zeros(8, 64, device="meta")),
            r"real_kv_sources\[1\].tensor must be on the records' device cpu, got meta",
        ),
    ],
)
def test_wrong_context_is_refused_at_its_first_launch(
    implementation: str, fields: dict[str, Any], message: str
) -> None:
    good = scenes.make_context(sources=(GOOD,), mode=RealKvHashMode.ALL)
    arguments = scrub_arguments()
    launch_canary_scrub_kernel(**(arguments | {"context": good}))
    wrong = dataclasses.replace(good, **fields)
    with pytest.raises(ValueError, match=f"^kvcanary: .*({message})"):
        launch_canary_scrub_kernel(**(arguments | {"context": wrong}))


# ---- allocations ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "allocate",
    [
        lambda size: WritePlan.allocate(write_req_capacity=size, device="cpu"),
        lambda size: VerifyPlan.allocate(verify_capacity=size, device="cpu"),
        lambda size: allocate_records(num_slots=size, device=scenes.CPU),
        lambda size: SlotTable.allocate(num_slots=size, device=scenes.CPU, tracks_allocation=False),
    ],
)
@pytest.mark.parametrize("size", [0, -3])
def test_capacities_must_be_positive(allocate: Callable[[int], object], size: int) -> None:
    with pytest.raises(ValueError, match=f"^kvcanary: .* must be positive, got {size}"):
        allocate(size)


def test_allocated_plans_have_the_shapes_of_the_contract() -> None:
    write_plan = WritePlan.allocate(write_req_capacity=5, device="cpu")
    assert write_plan.write_offsets.shape == (6,)
    assert write_plan.write_seed_slot_indices.shape == (5,)
    assert write_plan.write_num_valid_reqs.dtype == torch.int32
    verify_plan = VerifyPlan.allocate(verify_capacity=5, device="cpu")
    assert verify_plan.verify_slot_indices.shape == (5,)
    assert verify_plan.enable.dtype == torch.int32
    for plan in (write_plan, verify_plan):
        assert all(not tensor.any() for tensor in scenes.tensors(plan.zero_for_testing_()).values())


# ---- the raw functions ---------------------------------------------------------------------------


def raw_write(context: VerifyOrWriteContext, **changes: Any) -> None:
    """Call the compiled function itself, past every Python check."""
    load_kernels("cpu")
    arguments = write_arguments() | {"launch": packed(context).launch} | changes
    plan = arguments["plan"]
    kernels = kernels_for(scenes.CPU)
    assert kernels is not None
    kernels.canary_write(
        arguments["launch"],
        plan.write_offsets,
        plan.write_seed_slot_indices,
        plan.write_num_valid_reqs,
        plan.write_request_uids,
        plan.write_identity_keys,
        arguments["input_ids"],
        arguments["positions"],
        arguments["out_cache_loc"],
        arguments["expected_input_tokens"],
        arguments["expected_input_positions"],
        1,
        False,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"launch": torch.zeros(19, dtype=torch.int64)}, "launch must be the int64"),
        ({"positions": torch.arange(4)}, "positions must have 3 entries like input_ids, got 4"),
        ({"input_ids": torch.zeros(3)}, "input_ids must be int32 or int64, got float32"),
        ({"out_cache_loc": strided(torch.arange(3))}, "out_cache_loc must be contiguous"),
        (
            {"expected_input_tokens": None},
            "expected_input_tokens and expected_input_positions must be given together",
        ),
    ],
)
def test_raw_function_checks_for_itself(changes: dict[str, Any], message: str) -> None:
    context = scenes.make_context()
    raw_write(context)
    with pytest.raises(ValueError, match=f"kvcanary: {message}"):
        raw_write(context, **changes)


def test_raw_cpu_function_refuses_records_of_a_gpu() -> None:
    context = scenes.make_context()
    launch = packed(context).launch.clone()
    launch[-1] = 3
    with pytest.raises(ValueError, match=r"launch must belong to records on the CPU, got .*cuda:3"):
        raw_write(context, launch=launch)
