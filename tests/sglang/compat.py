"""Does a version of SGLang have what the hook uses? Read from its source, nothing is installed.

    python -m tests.sglang.compat DIRECTORY    # downloads the versions that the docs list, checks
                                               # them, and writes the table in docs/compatibility.md

Each hook target has to exist and to take what our hook function passes on; classes have to have
the members that are read without a fallback.
"""

from __future__ import annotations

import argparse
import inspect
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from kvcanary_plugin.hooks.sglang import versions
from tests.sglang.doc_blocks import table, write_block
from tests.sglang.engine_source import Source

VERSIONS = ("0.5.16", "0.5.21", "0.5.23")
BLOCK = "SGLang versions"

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_BATCH = "sglang.srt.model_executor.forward_batch_info"
_SCHEDULE = "sglang.srt.managers.schedule_batch"
_CACHE = "sglang.srt.mem_cache"

BY_FEATURE = ", for some features only"
NO_SUCH_CLASS = "no such class"
ALWAYS_HOOKED = {
    *versions.MAIN_PROCESS_TARGETS,
    versions.CONFIGURE_SCHEDULER,
    *versions.SCHEDULER_TARGETS,
}

# What is read of an engine class without a fallback. A set of names: one of them has to be there.
MEMBERS: Mapping[str, tuple[str | frozenset[str], ...]] = {
    _RUNNER: (
        "server_args",
        "model_config",
        "req_to_token_pool",
        "token_to_kv_pool",
        "token_to_kv_pool_allocator",
        "max_total_num_tokens",
        "sliding_window_size",
    ),
    f"{_BATCH}.ForwardBatch": (
        "forward_mode",
        "batch_size",
        "input_ids",
        "req_pool_indices",
        "seq_lens",
        "out_cache_loc",
        "positions",
        "extend_prefix_lens",
        "extend_seq_lens",
        "spec_info",
        "rids",
    ),
    f"{_BATCH}.ForwardMode": (
        "is_idle",
        "is_decode",
        "is_mixed",
        "is_target_verify",
        "is_extend_without_speculative",
        "is_split_prefill",
    ),
    f"{_SCHEDULE}.ScheduleBatch": ("reqs",),
    f"{_SCHEDULE}.Req": (
        "rid",
        "to_finish",
        "extra_key",
        "lora_id",
        frozenset({"fill_ids", "full_untruncated_fill_ids"}),
        frozenset({"req_pool_idx", "kv"}),
    ),
    f"{_CACHE}.memory_pool.ReqToTokenPool": ("req_to_token",),
    f"{_CACHE}.allocator.token.TokenToKVPoolAllocator": ("alloc", "free", "clear"),
    f"{_CACHE}.allocator.paged.PagedTokenToKVPoolAllocator": (
        "alloc",
        "alloc_extend",
        "alloc_decode",
        "free",
        "clear",
        "page_size",
    ),
    f"{_CACHE}.allocator.swa.SWATokenToKVPoolAllocator": (
        "full_attn_allocator",
        "swa_attn_allocator",
    ),
}

# What the adapters read of a pool class; a version that lacks the class never makes one.
_MHA = ("k_buffer", "v_buffer", "size", "page_size")
_MLA = ("kv_buffer", "size", "page_size")
POOLS: Mapping[str, tuple[str | frozenset[str], ...]] = {
    f"{_CACHE}.memory_pool.MHATokenToKVPool": (*_MHA, "kv_cache_layout"),
    f"{_CACHE}.memory_pool.PageMajorMHATokenToKVPool": _MHA,
    f"{_CACHE}.memory_pool.MHATokenToKVPoolFP4": (*_MHA, "k_scale_buffer", "v_scale_buffer"),
    f"{_CACHE}.memory_pool.MHATokenToKVPoolMXFP8": _MHA,
    f"{_CACHE}.memory_pool.MLATokenToKVPool": _MLA,
    f"{_CACHE}.memory_pool.MLATokenToKVPoolFP4": (*_MLA, "kv_scale_buffer"),
    f"{_CACHE}.memory_pool.DSATokenToKVPool": (
        *_MLA,
        "index_k_with_scale_buffer",
        "index_head_dim",
        "quant_block_size",
    ),
    f"{_CACHE}.swa_memory_pool.SWAKVPool": (
        "full_kv_pool",
        "swa_kv_pool",
        "full_layer_nums",
        "full_to_swa_index_mapping",
    ),
    f"{_CACHE}.memory_pool.HybridLinearKVPool": ("full_kv_pool",),
    f"{_CACHE}.qsa_kv_pool.QSATokenToKVPool": ("full_kv_pool",),
    f"{_CACHE}.memory_pool.MiniMaxSparseKVPool": (
        "main_pool",
        "index_kv_pool",
        "index_k_pool",
        "size",
        "page_size",
    ),
    f"{_CACHE}.deepseek_v4_memory_pool.DeepSeekV4TokenToKVPool": (
        "swa_kv_pool",
        "swa_page_size",
        "full_to_swa_index_mapping",
    ),
}


@dataclass(frozen=True, slots=True)
class Hook:
    """A hook target and the function that is put on it.

    Fields:
        target: dotted path.
        function: ours.
        added: leading parameters of ``function`` that are not the target's: the original function
            or its result.
    """

    target: str
    function: Callable[..., Any]
    added: int


def hooks() -> list[Hook]:
    """Everything that the plugin registers, for every feature, in an SGLang that is installed."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from kvcanary_plugin.hooks.sglang import attach, features, flag, plugin

    found: list[Hook] = []

    def register(target: str, function: Callable[..., Any], kind: Any) -> None:
        found.append(Hook(target, function, added=0 if kind is HookType.BEFORE else 1))

    scheduler = {"sglang.srt.managers.scheduler": ModuleType("scheduler")}
    with (
        patch.object(HookRegistry, "register", register),
        patch.object(HookRegistry, "apply_hooks", lambda: None),
        patch.object(HookRegistry, "_patched", _Everything()),
        patch.dict(sys.modules, scheduler),
        patch.object(flag, "extend_engine_arguments", lambda: None),
        patch.object(flag, "config_of_this_process", lambda: object()),
        patch.object(attach, "features_in_use", lambda _args: features.FEATURES),
    ):
        plugin.register()
        plugin._after_configure_scheduler(None)
        with patch.object(HookRegistry, "_patched", set()):
            attach._hook_features(object())
    return list({hook.target: hook for hook in found}.values())


class _Everything:
    def __contains__(self, _target: object) -> bool:
        return True


def problem_of_hook(source: Source, hook: Hook) -> str | None:
    """Why ``hook`` cannot be put on its target in that version; None if it can."""
    target = source.function(hook.target)
    if target is None:
        return "missing"
    arguments = target.args
    theirs = len(arguments.posonlyargs) + len(arguments.args)
    parameters = list(inspect.signature(hook.function).parameters.values())[hook.added :]
    kinds = [parameter.kind for parameter in parameters]
    ours = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if theirs < ours:
        return f"takes {theirs} arguments, the hook expects {ours}"
    takes_more = inspect.Parameter.VAR_POSITIONAL in kinds
    takes_names = inspect.Parameter.VAR_KEYWORD in kinds
    if theirs > ours and not (takes_more or takes_names):
        return f"takes {theirs} arguments, the hook passes {ours}"
    if arguments.kwonlyargs and not takes_names:
        return f"takes {arguments.kwonlyargs[0].arg}= by name, the hook does not pass it"
    return None


def problem_of_members(
    source: Source, path: str, members: tuple[str | frozenset[str], ...]
) -> str | None:
    """What a class lacks; None if it has everything."""
    there = source.members(path)
    missing = [
        member if isinstance(member, str) else " or ".join(sorted(member))
        for member in members
        if not ({member} if isinstance(member, str) else member) & there
    ]
    return f"no {', '.join(missing)}" if missing else None


def check(source: Source, hooked: list[Hook]) -> Iterator[tuple[str, str]]:
    """(row, verdict) for everything that the plugin uses: ``yes`` or what is wrong."""
    for hook in hooked:
        row = f"hook `{_short(hook.target)}`"
        if hook.target not in ALWAYS_HOOKED:
            row += BY_FEATURE
        yield row, problem_of_hook(source, hook) or "yes"
    for path, members in MEMBERS.items():
        yield f"fields of `{_short(path, 1)}`", problem_of_members(source, path, members) or "yes"
    for path, members in POOLS.items():
        if source.has_class(path):
            verdict = problem_of_members(source, path, members) or "yes"
        else:
            verdict = NO_SUCH_CLASS
        yield f"pool `{_short(path, 1)}`", verdict


def problems(column: Mapping[str, str]) -> list[str]:
    """What a version lacks without which no server can be guarded."""
    return [
        f"{row}: {verdict}"
        for row, verdict in column.items()
        if verdict not in ("yes", NO_SUCH_CLASS) and not row.endswith(BY_FEATURE)
    ]


def _short(path: str, parts: int = 2) -> str:
    return ".".join(path.split(".")[-parts:])


def versions_table(verdicts: Mapping[str, Mapping[str, str]]) -> str:
    """A row for each thing used, a column for each version."""
    rows = dict.fromkeys(row for column in verdicts.values() for row in column)
    return table(
        ("used", *verdicts), [[row, *(column[row] for column in verdicts.values())] for row in rows]
    )


def fetch(version: str, directory: Path) -> Source:
    """The source of a version, downloaded without what it depends on."""
    folder = directory / version
    if not (folder / "sglang").exists():
        command = ["pip", "download", "--quiet", "--no-deps", "--dest", str(directory)]
        subprocess.run([sys.executable, "-m", *command, f"sglang=={version}"], check=True)
        (wheel,) = directory.glob(f"sglang-{version}-*.whl")
        with zipfile.ZipFile(wheel) as packed:
            wanted = [name for name in packed.namelist() if name.endswith((".py", "METADATA"))]
            packed.extractall(folder, wanted)
        wheel.unlink()
    return Source(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="where the unpacked versions are kept")
    directory: Path = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    hooked = hooks()
    verdicts = {version: dict(check(fetch(version, directory), hooked)) for version in VERSIONS}
    content = versions_table(verdicts)
    print(content)
    write_block(BLOCK, content)
    return int(any(problems(column) for column in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
