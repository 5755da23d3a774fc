"""Which ways of running SGLang are covered, by their server settings."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvcanary_plugin.hooks.sglang.features import (
    FEATURES,
    Coverage,
    features_in_use,
    unsupported_feature,
    unsupported_pool,
)


def settings(**values: Any) -> Any:
    return SimpleNamespace(**values)


def test_a_plain_server_uses_none_of_them():
    assert features_in_use(settings(speculative_algorithm=None, disaggregation_mode="null")) == ()


@pytest.mark.parametrize(
    "values",
    [
        {"speculative_algorithm": "DFLASH"},
        {"speculative_algorithm": "EAGLE", "pp_size": 2},
        {
            "speculative_algorithm": "EAGLE",
            "enable_multi_layer_eagle": True,
            "speculative_eagle_topk": 4,
        },
        {"enable_hisparse": True},
        {"enable_hierarchical_cache": True, "hicache_storage_backend": "file"},
        {
            "enable_hierarchical_cache": True,
            "disaggregation_mode": "decode",
            "disaggregation_decode_host_receive_threshold": 0.5,
        },
        {"enable_lmcache": True},
        {"enable_flexkv": True},
        {"enable_unified_cache_external_linker": True},
        {"radix_cache_backend": "flexkv"},
        {"dllm_algorithm": "LowConfidence"},
    ],
)
def test_settings_under_which_writes_go_unseen_are_unsupported(values: dict[str, Any]):
    reason = unsupported_feature(settings(**values))
    assert reason is not None
    assert all(feature.note for feature in features_in_use(settings(**values)))


@pytest.mark.parametrize(
    ("values", "unguarded"),
    [
        ({"speculative_algorithm": "NGRAM"}, []),
        ({"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4}, ["draft"]),
        ({"speculative_algorithm": "eagle3", "enable_multi_layer_eagle": True}, ["draft"]),
    ],
)
def test_speculation_guards_the_target_model(values: dict[str, Any], unguarded: list[str]):
    assert unsupported_feature(settings(**values)) is None
    (feature,) = features_in_use(settings(**values))
    assert feature.coverage is Coverage.COVERED
    assert [group.name for group in feature.unguarded] == unguarded


@pytest.mark.parametrize(
    ("values", "coverage", "not_with"),
    [
        ({"disaggregation_mode": "prefill"}, Coverage.COVERED, set()),
        ({"disaggregation_mode": "decode"}, Coverage.EXTERNAL, set()),
        ({"enable_hierarchical_cache": True}, Coverage.EXTERNAL, {"DSATokenToKVPool"}),
    ],
)
def test_slots_that_travel_are_guarded_in_some_pools(
    values: dict[str, Any], coverage: Coverage, not_with: set[str]
):
    args = settings(**values)
    assert unsupported_feature(args) is None
    assert [feature.coverage for feature in features_in_use(args)] == [coverage]
    pools = ("MHATokenToKVPool", "MLATokenToKVPool", "SWAKVPool", "DSATokenToKVPool")
    assert {pool for pool in pools if unsupported_pool(args, pool)} == not_with


HOOK_EVERYTHING = """
from types import SimpleNamespace
from sglang.srt.speculative import eagle_worker_common, ngram_worker
from kvcanary_plugin.hooks.sglang import attach, features

attach.features_in_use = lambda _: features.FEATURES
print(attach._hook_features(SimpleNamespace()))
for module in (eagle_worker_common, ngram_worker):
    print(hasattr(module.move_accept_tokens_to_target_kvcache, "__wrapped__"))
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.l2_transfer import L2TransferEngine
print(hasattr(ScheduleBatch.process_prebuilt, "__wrapped__"))
print(hasattr(L2TransferEngine.submit_device_to_host, "__wrapped__"))
"""


def test_the_engine_calls_what_the_features_hook():
    """In a process of its own: SGLang's hooks cannot be taken off again."""
    output = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HOOK_EVERYTHING],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout.split()
    assert output == ["[]", "True", "True", "True", "True"]


def test_each_feature_has_a_name_of_its_own_and_a_note():
    assert len({feature.name for feature in FEATURES}) == len(FEATURES)
    assert all(feature.note for feature in FEATURES)
