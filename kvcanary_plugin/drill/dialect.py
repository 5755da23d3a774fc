"""How a client talks to each engine: paths, and the shapes of what it sends and gets."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

Tokens = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What the server returned for one request.

    Fields:
        output: the output tokens.
        prompt_tokens: prompt length as the server counts it.
        cached_tokens: how much of the prompt came out of its prefix cache.
        aborted: whether the server says that it was given up.
    """

    output: Tokens
    prompt_tokens: int
    cached_tokens: int
    aborted: bool


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One engine's HTTP interface.

    Fields:
        generate_path: where a request goes.
        payload: (prompt, max_new_tokens, request id or None) to the JSON that asks for them,
            decoded greedily, without a stop token.
        completion: its answer.
        flush_path: where the prefix cache is forgotten.
        has_flushed: (status, text) of its answer to whether it was; if not, requests still run.
        abort: request id to (path, JSON) that ends it; None where a client can only hang up.
    """

    generate_path: str
    payload: Callable[[Sequence[int], int, str | None], dict[str, Any]]
    completion: Callable[[dict[str, Any]], Completion]
    flush_path: str
    has_flushed: Callable[[int, str], bool]
    abort: Callable[[str], tuple[str, dict[str, Any]]] | None


def _sglang_payload(
    prompt: Sequence[int], max_new_tokens: int, request_id: str | None
) -> dict[str, Any]:
    payload: dict[str, Any] = {
        "input_ids": list(prompt),
        "sampling_params": {
            "max_new_tokens": max_new_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
        },
    }
    return payload if request_id is None else payload | {"rid": request_id}


def _sglang_completion(answer: dict[str, Any]) -> Completion:
    meta = answer["meta_info"]
    return Completion(
        output=tuple(answer["output_ids"]),
        prompt_tokens=meta["prompt_tokens"],
        cached_tokens=meta["cached_tokens"],
        aborted=meta["finish_reason"]["type"] == "abort",
    )


SGLANG: Final = Dialect(
    generate_path="/generate",
    payload=_sglang_payload,
    completion=_sglang_completion,
    flush_path="/flush_cache",
    has_flushed=lambda status, _text: status == 200,
    abort=lambda request_id: ("/abort_request", {"rid": request_id}),
)


def _vllm_payload(
    prompt: Sequence[int], max_new_tokens: int, request_id: str | None
) -> dict[str, Any]:
    payload: dict[str, Any] = {
        "prompt": list(prompt),
        "max_tokens": max_new_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return payload if request_id is None else payload | {"request_id": request_id}


def _vllm_completion(answer: dict[str, Any]) -> Completion:
    (choice,) = answer["choices"]
    usage = answer["usage"]
    # Null where nothing was cached.
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Completion(
        output=tuple(choice["token_ids"]),
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=cached,
        aborted=choice["finish_reason"] == "abort",
    )


def _vllm_has_flushed(status: int, text: str) -> bool:
    # A refusal has status 200 as well; a version whose answer is empty does not say.
    return status == 200 and (not text or bool(json.loads(text)["success"]))


VLLM: Final = Dialect(
    generate_path="/v1/completions",
    payload=_vllm_payload,
    completion=_vllm_completion,
    flush_path="/reset_prefix_cache",
    has_flushed=_vllm_has_flushed,
    abort=None,
)
