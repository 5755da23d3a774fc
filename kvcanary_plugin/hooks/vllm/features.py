"""What this hook covers of the ways in which vLLM fills blocks outside of a plain forward."""

from __future__ import annotations

from typing import Any

# Connectors of vLLM that load nothing but what `update_state_after_alloc` was told, and not before
# their workers hear of it. MoRIIO and NIXL in push mode are left out: there the other side writes.
_CONNECTORS = frozenset(
    {
        "DecodeBenchConnector",
        "ExampleConnector",
        "ExampleHiddenStatesConnector",
        "FlexKVConnectorV1",
        "HF3FSKVConnector",
        "LMCacheConnectorV1",
        "LMCacheMPConnector",
        "MooncakeConnector",
        "MooncakeStoreConnector",
        "MultiConnector",
        "NixlConnector",
        "NixlPullConnector",
        "OffloadingConnector",
        "SimpleCPUOffloadConnector",
    }
)
# LMCache loads whole chunks, with the tokens at the front of the first that vLLM has cached.
_REWRITING_CONNECTORS = frozenset({"ExampleConnector", "LMCacheConnectorV1"})


def unsupported_setup(vllm_config: Any) -> str | None:
    """Why nothing of an engine is guarded; None where everything else decides."""
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    unknown = unknown_connectors(transfer) if transfer is not None else []
    if unknown:
        return f"KV connector {', '.join(unknown)} moves K/V in unseen; it has no adapter"
    if _context_parallel_size(vllm_config.parallel_config) > 1:
        return "context parallelism spreads a sequence over ranks; it has no adapter"
    return None


def arrays_stay_through_forward(vllm_config: Any) -> bool:
    """Whether a batch's arrays, and the records of what it reads, stay as they are until the end.

    A model with media clamps token ids while it runs; a connector may still load beside a forward.
    """
    has_connector = getattr(vllm_config, "kv_transfer_config", None) is not None
    return not has_connector and not vllm_config.model_config.is_multimodal_model


def unknown_connectors(kv_transfer_config: Any) -> list[str]:
    """Connectors without adapter in a configuration, those of a MultiConnector included."""
    names = [kv_transfer_config.kv_connector]
    if getattr(kv_transfer_config, "kv_connector_module_path", None):
        return names  # somebody's own class, whatever its name
    if names == ["MultiConnector"]:
        parts = kv_transfer_config.kv_connector_extra_config.get("connectors", ())
        names = [part.get("kv_connector_module_path") or part.get("kv_connector") for part in parts]
    return [name for name in names if name not in _CONNECTORS]


def rewrites_cached_tokens(connector: Any) -> bool:
    """Whether a connector loads tokens as well that the engine has in its own cache."""
    parts = getattr(connector, "_connectors", None) or [connector]
    return any(type(part).__name__ in _REWRITING_CONNECTORS for part in parts)


def _context_parallel_size(parallel_config: Any) -> int:
    """In how many parts the tokens of one sequence lie on different ranks."""
    return int(getattr(parallel_config, "decode_context_parallel_size", 1)) * int(
        getattr(parallel_config, "prefill_context_parallel_size", 1)
    )
