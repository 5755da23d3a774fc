"""Everything that is wrapped or read of vLLM exists there: of the installed one, or of any wheel.

Nothing is imported, so that a wheel for another machine will do::

    pip download --no-deps vllm==0.33.0 && unzip -q vllm-0.33.0-*.whl 'vllm/*.py' -d 0.33.0
    KVCANARY_VLLM_SOURCE=0.33.0/vllm pytest tests/vllm/test_versions.py
"""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path

import pytest

_CONNECTORS = "distributed/kv_transfer/kv_connector"
BOTH_RUNNERS = {
    "engine/arg_utils.py": {
        "EngineArgs": {
            "add_cli_args",
            "additional_config",
            "create_engine_config",
            "from_cli_args",
        }
    },
    "v1/worker/worker_base.py": {"WorkerWrapperBase": {"initialize_from_config"}},
    "v1/worker/gpu_worker.py": {"Worker": {"compile_or_warm_up_model", "sleep", "wake_up"}},
    "v1/core/sched/output.py": {
        "NewRequestData": {"from_request", "lora_request", "mm_features", "prompt_token_ids"},
        "SchedulerOutput": {
            "finished_req_ids",
            "new_block_ids_to_zero",
            "scheduled_new_reqs",
            "scheduled_spec_decode_tokens",
            "total_num_scheduled_tokens",
        },
    },
    "v1/request.py": {
        "Request": {
            "all_token_ids",
            "cache_salt",
            "lora_request",
            "mm_features",
            "num_prompt_tokens",
            "request_id",
        }
    },
    "v1/core/kv_cache_manager.py": {"KVCacheBlocks": {"get_block_ids"}},
    f"{_CONNECTORS}/factory.py": {"KVConnectorFactory": {"create_connector"}},
    f"{_CONNECTORS}/v1/base.py": {
        "KVConnectorBase_V1": {
            "build_connector_meta",
            "get_num_new_matched_tokens",
            "role",
            "update_state_after_alloc",
        },
        "KVConnectorRole": {"SCHEDULER"},
    },
    "v1/kv_cache_interface.py": {
        "KVCacheGroupSpec": {"kv_cache_spec", "layer_names"},
        "SlidingWindowSpec": {"sliding_window"},
        "UniformTypeKVCacheSpecs": {"kv_cache_specs"},
    },
}
RUNNERS = {
    "v1": {
        "v1/worker/gpu_model_runner.py": {
            "GPUModelRunner": {
                "_model_forward",
                "_sample",
                "execute_model",
                "get_model",
                "input_batch",
                "input_ids",
                "max_num_reqs",
                "num_computed_tokens",
                "positions",
                "query_start_loc",
                "seq_lens",
            }
        },
        "v1/worker/gpu_input_batch.py": {
            "InputBatch": {
                "block_table",
                "num_computed_tokens_cpu",
                "num_prompt_tokens",
                "num_reqs",
                "num_tokens_no_spec",
                "req_ids",
                "token_ids_cpu",
            }
        },
        "v1/worker/block_table.py": {
            "BlockTable": {"block_size", "block_table", "slot_mapping"},
            "MultiGroupBlockTable": {"block_tables"},
        },
    },
    "v2": {
        "v1/worker/gpu/model_runner.py": {
            "GPUModelRunner": {
                "block_tables",
                "execute_model",
                "get_model",
                "kv_connector",
                "max_num_reqs",
                "num_speculative_steps",
                "postprocess_sampled",
                "prepare_attn",
                "prepare_dummy_attn",
                "req_states",
            }
        },
        "v1/worker/gpu/input_batch.py": {
            "InputBatch": {
                "input_ids",
                "is_prefilling_np",
                "num_computed_tokens_np",
                "num_draft_tokens",
                "num_reqs",
                "num_scheduled_tokens",
                "num_tokens",
                "positions",
                "query_start_loc",
                "req_ids",
                "seq_lens",
            }
        },
        "v1/worker/gpu/block_table.py": {"BlockTables": {"block_sizes", "input_block_tables"}},
        "v1/worker/gpu/kv_connector.py": {"KVConnector": {"pre_forward"}},
        "v1/worker/gpu/states.py": {"RequestState": {"total_len"}},
    },
}


@pytest.fixture(scope="module")
def source() -> Path:
    """The package directory of the vLLM that is looked at."""
    given = os.environ.get("KVCANARY_VLLM_SOURCE")
    if given is not None:
        return Path(given)
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vllm is not installed, and KVCANARY_VLLM_SOURCE names no unpacked wheel")
    return Path(spec.origin).parent


def missing(source: Path, targets: dict[str, dict[str, set[str]]]) -> list[str]:
    """``file: Class.name`` of what is not there."""
    return [
        f"{file}: {class_name}.{name}"
        for file, classes in targets.items()
        for class_name, names in classes.items()
        for name in sorted(names - names_of(source / file, class_name))
    ]


def names_of(file: Path, class_name: str) -> set[str]:
    """Methods and fields of a class and of its bases in the same file, ``self.name`` included."""
    if not file.exists():
        return set()
    classes = {
        node.name: node
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }
    names: set[str] = set()
    waiting = [class_name]
    while waiting:
        found = classes.get(waiting.pop())
        if found is None:
            continue
        waiting += [base.id for base in found.bases if isinstance(base, ast.Name)]
        for node in ast.walk(found):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return names


def test_what_both_runners_share_is_there(source):
    assert missing(source, BOTH_RUNNERS) == []


@pytest.mark.parametrize("runner", RUNNERS)
def test_what_a_runner_needs_is_there(source, runner):
    assert missing(source, RUNNERS[runner]) == []


def test_what_the_hooks_ask_for_at_start_up_is_among_what_is_looked_for(source):
    from kvcanary_plugin.hooks.vllm import versions

    for runner, asked in (("v1", versions._V1_ATTRIBUTES), ("v2", versions._V2_ATTRIBUTES)):
        (model_runner,) = (
            classes["GPUModelRunner"]
            for file, classes in RUNNERS[runner].items()
            if file.endswith("model_runner.py")
        )
        assert set(asked) <= model_runner
