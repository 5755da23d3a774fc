"""Server settings under which SGLang fills slots where this hook does not look."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Setting, whether its value switches the feature on, why it is refused: a canary that misses writes
# would alarm on slots that are fine.
UNSUPPORTED_FEATURES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("speculative_algorithm", bool, "speculative decoding is not covered"),
    ("enable_hierarchical_cache", bool, "load-back from a hierarchical cache is not covered"),
    (
        "disaggregation_mode",
        lambda mode: mode not in (None, "null"),
        "slots filled by prefill/decode disaggregation are not covered",
    ),
    ("enable_pdmux", bool, "split prefill (pdmux) is not covered"),
    ("enable_hisparse", bool, "hierarchical sparse attention is not covered"),
    ("enable_lmcache", bool, "load-back from LMCache is not covered"),
    ("dllm_algorithm", bool, "diffusion models are not covered"),
)


def unsupported_feature(server_args: Any) -> str | None:
    """Why nothing can be guarded under these settings; None if nothing stands against it."""
    for name, is_on, reason in UNSUPPORTED_FEATURES:
        if is_on(getattr(server_args, name, None)):
            return reason
    return None
