"""What this hook covers of the ways in which SGLang fills slots outside of a plain forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvcanary_plugin.canary import UnguardedGroup
from kvcanary_plugin.hooks.sglang import versions

_CHAINS_OR_TREES = frozenset({"EAGLE", "EAGLE3", "NEXTN", "STANDALONE"})
_NGRAM = "NGRAM"

# Pools whose bytes the hierarchical cache moves in one piece for each group.
_IN_ONE_PIECE = frozenset({"MHATokenToKVPool", "MLATokenToKVPool", "SWAKVPool"})

_DRAFT = UnguardedGroup(
    "draft",
    "the draft worker writes its pool step by step in graphs of its own; K/V that is wrong there"
    " costs accepted drafts, never a token of the output",
)


class Coverage(StrEnum):
    """How far slots that a feature fills are guarded."""

    COVERED = "covered"
    EXTERNAL = "external"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True)
class Feature:
    """A way of running SGLang.

    Fields:
        name: how the docs call it.
        is_on: whether these server settings switch it on.
        coverage: what becomes of the slots that it fills. Under an unsupported feature nothing is
            guarded, because a canary that misses writes would alarm on slots that are fine.
        note: what is done, or why it is not.
        unguarded: what stays unguarded beside the rest.
        hooks: what has to exist in the engine beside the targets that every server needs.
        pools: classes of pools that it works with; None for all.
    """

    name: str
    is_on: Callable[[Any], bool]
    coverage: Coverage
    note: str
    unguarded: tuple[UnguardedGroup, ...] = ()
    hooks: tuple[str, ...] = ()
    pools: frozenset[str] | None = None


def _has(setting: str) -> Callable[[Any], bool]:
    return lambda server_args: bool(getattr(server_args, setting, None))


def _speculates(*algorithms: str) -> Callable[[Any], bool]:
    return lambda server_args: _algorithm(server_args) in algorithms


def _algorithm(server_args: Any) -> str | None:
    name = getattr(server_args, "speculative_algorithm", None)
    return str(name).upper() if name else None


def _speculates_otherwise(server_args: Any) -> bool:
    algorithm = _algorithm(server_args)
    return algorithm is not None and algorithm not in {*_CHAINS_OR_TREES, _NGRAM}


def _speculates_in_a_pipeline(server_args: Any) -> bool:
    return _algorithm(server_args) is not None and getattr(server_args, "pp_size", 1) > 1


def _drafts_trees_in_several_layers(server_args: Any) -> bool:
    topk = getattr(server_args, "speculative_eagle_topk", None) or 1
    return bool(getattr(server_args, "enable_multi_layer_eagle", False)) and topk > 1


def _receives_on_a_shared_host(server_args: Any) -> bool:
    threshold = getattr(server_args, "disaggregation_decode_host_receive_threshold", None)
    return bool(getattr(server_args, "enable_hierarchical_cache", False)) and (
        threshold is not None and threshold < 1
    )


def _disaggregates(mode: str) -> Callable[[Any], bool]:
    return lambda server_args: getattr(server_args, "disaggregation_mode", None) == mode


FEATURES: tuple[Feature, ...] = (
    Feature(
        "speculation with n-gram drafts",
        _speculates(_NGRAM),
        Coverage.COVERED,
        "what is accepted gets its records when the engine has moved it into place",
        hooks=(versions.KEEP_DRAFTS,),
    ),
    Feature(
        "speculation with a draft model (EAGLE, EAGLE3, NEXTN, STANDALONE)",
        _speculates(*_CHAINS_OR_TREES),
        Coverage.COVERED,
        "the target model's slots, chains and trees of drafts; not those of the draft model",
        unguarded=(_DRAFT,),
        hooks=(versions.KEEP_DRAFTS,),
    ),
    Feature(
        "speculation with other algorithms",
        _speculates_otherwise,
        Coverage.UNSUPPORTED,
        "how this algorithm places accepted tokens is not known to the hook",
    ),
    Feature(
        "speculation with pipeline parallelism",
        _speculates_in_a_pipeline,
        Coverage.UNSUPPORTED,
        "stages learn what was accepted only after they have run other batches",
    ),
    Feature(
        "multi-layer EAGLE with trees",
        _drafts_trees_in_several_layers,
        Coverage.UNSUPPORTED,
        "accepted tokens are not moved into place",
    ),
    Feature(
        "hierarchical cache",
        _has("enable_hierarchical_cache"),
        Coverage.EXTERNAL,
        "records stay while bytes are on the host, and what is loaded back is compared with them",
        hooks=(versions.BACKUP, versions.LOAD_BACK, versions.ATTACH_STORAGE),
        pools=_IN_ONE_PIECE,
    ),
    Feature(
        "hierarchical cache with storage",
        _has("hicache_storage_backend"),
        Coverage.UNSUPPORTED,
        "what storage brings back comes without records",
    ),
    Feature(
        "hierarchical cache of a decode server that receives on the host",
        _receives_on_a_shared_host,
        Coverage.UNSUPPORTED,
        "what is received there comes without records, into slots that had others",
    ),
    Feature(
        "prefill/decode disaggregation, prefill server",
        _disaggregates("prefill"),
        Coverage.COVERED,
        "it computes every slot itself; what it sends is not looked at",
    ),
    Feature(
        "prefill/decode disaggregation, decode server",
        _disaggregates("decode"),
        Coverage.EXTERNAL,
        "what was sent is adopted as it is found when the request is ready to run",
        hooks=(versions.PREBUILT,),
    ),
    Feature(
        "prefill/decode disaggregation with a role that changes",
        _has("enable_pd_role_switch"),
        Coverage.EXTERNAL,
        "as of the decode server; a change of role flushes the cache",
        hooks=(versions.PREBUILT,),
    ),
    Feature(
        "split prefill (pdmux)",
        _has("enable_pdmux"),
        Coverage.UNSUPPORTED,
        "prefill and decode run on two streams at once, and the canary's steps on one",
    ),
    Feature(
        "hierarchical sparse attention",
        _has("enable_hisparse"),
        Coverage.UNSUPPORTED,
        "slots are swapped with the host inside the attention",
    ),
    Feature(
        "LMCache",
        _has("enable_lmcache"),
        Coverage.UNSUPPORTED,
        "its connector writes slots where this hook does not look",
    ),
    Feature(
        "FlexKV",
        _has("enable_flexkv"),
        Coverage.UNSUPPORTED,
        "its connector writes slots where this hook does not look",
    ),
    Feature(
        "external linker of the cache",
        _has("enable_unified_cache_external_linker"),
        Coverage.UNSUPPORTED,
        "its connector writes slots where this hook does not look",
    ),
    Feature(
        "a radix cache of another package",
        _has("radix_cache_backend"),
        Coverage.UNSUPPORTED,
        "how it fills slots is not known to the hook",
    ),
    Feature(
        "diffusion models",
        _has("dllm_algorithm"),
        Coverage.UNSUPPORTED,
        "a block of tokens is computed again and again before it is final",
    ),
)


def features_in_use(server_args: Any) -> tuple[Feature, ...]:
    """The features that these settings switch on."""
    return tuple(feature for feature in FEATURES if feature.is_on(server_args))


def unsupported_pool(server_args: Any, pool_class: str) -> str | None:
    """Why a pool of that class cannot be guarded under these settings; None if it can."""
    for feature in features_in_use(server_args):
        if feature.pools is not None and pool_class not in feature.pools:
            return f"{feature.name}: not with a {pool_class}"
    return None


def unsupported_feature(server_args: Any) -> str | None:
    """Why nothing can be guarded under these settings; None if nothing stands against it."""
    for feature in features_in_use(server_args):
        if feature.coverage is Coverage.UNSUPPORTED:
            return f"{feature.name}: {feature.note}"
    return None
