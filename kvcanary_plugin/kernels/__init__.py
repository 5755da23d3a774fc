"""The kernel layer: launches over records, plans and page tables, and their references."""

from kvcanary_plugin.kernels.backend import load_kernels, use_torch_reference
from kvcanary_plugin.kernels.build import (
    CompilerNotFoundError,
    KernelBuildError,
    build_cpu,
    build_cuda,
)
from kvcanary_plugin.kernels.concatenate import concatenate_integers
from kvcanary_plugin.kernels.concatenate_ref import concatenate_integers_torch_reference
from kvcanary_plugin.kernels.consts import (
    CANARY_CHAIN_ANCHOR,
    RECORD_BYTES,
    VIOLATION_FIELDS,
    EventKind,
    FailReason,
    LaunchTag,
    RealKvHashMode,
    SlotState,
    ViolationField,
    pack_kernel_kind,
    unpack_kernel_kind,
)
from kvcanary_plugin.kernels.context import (
    RealKvSource,
    SlotTable,
    VerifyOrWriteContext,
    allocate_records,
)
from kvcanary_plugin.kernels.events import SlotEvent
from kvcanary_plugin.kernels.hashes import (
    chain_hash,
    chain_hash_reference,
    splitmix64,
    splitmix64_mix3,
)
from kvcanary_plugin.kernels.inputs import TableReads, TableSnapshot, VerifyPlan, WritePlan
from kvcanary_plugin.kernels.lifecycle import launch_canary_prepare_kernel
from kvcanary_plugin.kernels.lifecycle_ref import launch_canary_prepare_kernel_torch_reference
from kvcanary_plugin.kernels.plan import launch_canary_plan_kernels, translate_out_cache_loc
from kvcanary_plugin.kernels.plan_ref import (
    launch_canary_plan_kernels_torch_reference,
    translate_out_cache_loc_torch_reference,
)
from kvcanary_plugin.kernels.scrub import (
    launch_canary_scrub_kernel,
    launch_canary_scrub_range_kernel,
    launch_canary_seal_kernel,
)
from kvcanary_plugin.kernels.scrub_ref import (
    launch_canary_scrub_kernel_torch_reference,
    launch_canary_scrub_range_kernel_torch_reference,
    launch_canary_seal_kernel_torch_reference,
)
from kvcanary_plugin.kernels.side_stream import beside_the_engine
from kvcanary_plugin.kernels.snapshot import (
    launch_canary_compare_tables_kernel,
    launch_canary_snapshot_kernel,
)
from kvcanary_plugin.kernels.snapshot_ref import (
    launch_canary_compare_tables_kernel_torch_reference,
    launch_canary_snapshot_kernel_torch_reference,
)
from kvcanary_plugin.kernels.verify import (
    launch_canary_table_verify_kernel,
    launch_canary_verify_kernel,
)
from kvcanary_plugin.kernels.verify_ref import (
    launch_canary_table_verify_kernel_torch_reference,
    launch_canary_verify_kernel_torch_reference,
)
from kvcanary_plugin.kernels.write import join_writes, launch_canary_write_kernel
from kvcanary_plugin.kernels.write_ref import launch_canary_write_kernel_torch_reference

__all__ = [
    "CANARY_CHAIN_ANCHOR",
    "RECORD_BYTES",
    "VIOLATION_FIELDS",
    "CompilerNotFoundError",
    "EventKind",
    "FailReason",
    "KernelBuildError",
    "LaunchTag",
    "RealKvHashMode",
    "RealKvSource",
    "SlotEvent",
    "SlotState",
    "SlotTable",
    "TableReads",
    "TableSnapshot",
    "VerifyOrWriteContext",
    "VerifyPlan",
    "ViolationField",
    "WritePlan",
    "allocate_records",
    "beside_the_engine",
    "build_cpu",
    "build_cuda",
    "chain_hash",
    "chain_hash_reference",
    "concatenate_integers",
    "concatenate_integers_torch_reference",
    "join_writes",
    "launch_canary_compare_tables_kernel",
    "launch_canary_compare_tables_kernel_torch_reference",
    "launch_canary_plan_kernels",
    "launch_canary_plan_kernels_torch_reference",
    "launch_canary_prepare_kernel",
    "launch_canary_prepare_kernel_torch_reference",
    "launch_canary_scrub_kernel",
    "launch_canary_scrub_kernel_torch_reference",
    "launch_canary_scrub_range_kernel",
    "launch_canary_scrub_range_kernel_torch_reference",
    "launch_canary_seal_kernel",
    "launch_canary_seal_kernel_torch_reference",
    "launch_canary_snapshot_kernel",
    "launch_canary_snapshot_kernel_torch_reference",
    "launch_canary_table_verify_kernel",
    "launch_canary_table_verify_kernel_torch_reference",
    "launch_canary_verify_kernel",
    "launch_canary_verify_kernel_torch_reference",
    "launch_canary_write_kernel",
    "launch_canary_write_kernel_torch_reference",
    "load_kernels",
    "pack_kernel_kind",
    "splitmix64",
    "splitmix64_mix3",
    "translate_out_cache_loc",
    "translate_out_cache_loc_torch_reference",
    "unpack_kernel_kind",
    "use_torch_reference",
]
