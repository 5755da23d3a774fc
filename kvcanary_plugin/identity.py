"""Who a request is beyond its tokens, and the chain hash of a prefix as the host knows it."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvcanary_plugin.forward import Int64Array
from kvcanary_plugin.kernels import chain_hash

_KEY_DOMAIN = b"kvcanary identity key v1"


def identity_key(
    *,
    lora_id: str | None = None,
    cache_salt: str | None = None,
    multimodal: Iterable[tuple[int, str]] = (),
    weight_version: str | None = None,
) -> int:
    """The 64-bit key of everything that makes equal tokens mean different K/V; 0 for nothing.

    Each part is length-prefixed under its own name, so that no two different requests share an
    encoding (a LoRA called "x" is not a salt "x").

    Args:
        lora_id: adapter of the request.
        cache_salt: the tenant's or caller's salt.
        multimodal: (offset of the placeholder, content hash) of every image, audio, video.
        weight_version: version of the weights that computed the K/V.
    """
    parts: list[tuple[str, str]] = []
    if lora_id:
        parts.append(("lora", lora_id))
    if cache_salt:
        parts.append(("salt", cache_salt))
    parts.extend((f"multimodal@{offset}", content) for offset, content in multimodal)
    if weight_version:
        parts.append(("weights", weight_version))
    if not parts:
        return 0
    digest = hashlib.blake2b(_KEY_DOMAIN, digest_size=8)
    for name, value in parts:
        for text in (name, value):
            encoded = text.encode()
            digest.update(len(encoded).to_bytes(8, "little"))
            digest.update(encoded)
    key = int.from_bytes(digest.digest(), "little", signed=True)
    return key or 1  # 0 means "no key"


class Fingerprint:
    """A number of token sequences, ten times cheaper than their chain hash: is it still the same?

    A weighted sum modulo 2^64 with random weights, so that the order counts.
    """

    def __init__(self) -> None:
        self._random = np.random.default_rng()
        self._weights = np.zeros(0, dtype=np.int64)

    def of(self, tokens: Int64Array) -> int:
        """The number of ``tokens``; equal sequences have equal ones in this object only."""
        missing = tokens.shape[0] - self._weights.shape[0]
        if missing > 0:
            lowest = np.iinfo(np.int64).min
            more = self._random.integers(lowest, -1, missing + 4096, dtype=np.int64)
            self._weights = np.concatenate([self._weights, more])
        return int(np.dot(tokens, self._weights[: tokens.shape[0]]))


@dataclass(slots=True)
class _Progress:
    length: int
    chain: int
    key: int
    fingerprint: int


class PrefixHasher:
    """Running chain hash per request over its own tokens, so that each token is hashed once.

    A request that comes in chunks is admitted several times; each time only the tokens behind the
    last admission are new. Holds the most recently used ``capacity`` requests.
    """

    def __init__(self, *, capacity: int = 65536) -> None:
        self._progress: OrderedDict[tuple[int, int], _Progress] = OrderedDict()
        self._capacity = capacity
        self._fingerprint = Fingerprint()

    def prefix_hash(
        self,
        *,
        request_uid: int,
        tokens: Int64Array,
        prefix_len: int,
        key: int = 0,
        token_offset: int = 0,
    ) -> int:
        """Chain hash (signed int64) behind the first ``prefix_len`` slots of a request.

        Args:
            request_uid: who asks; a uid that comes back with other tokens starts anew.
            tokens: int64, the request's own from position 0 on; ``prefix_len + token_offset`` of
                them at least.
            prefix_len: slots of the prefix.
            key: identity key.
            token_offset: of the group: the slot of position p holds the token at p + token_offset.
        """
        tokens = tokens[token_offset : token_offset + prefix_len]
        seen = self._progress.get((request_uid, token_offset))
        if (
            seen is not None
            and seen.key == key
            and 0 < seen.length <= prefix_len
            and self._fingerprint.of(tokens[: seen.length]) == seen.fingerprint
        ):
            chain = seen.chain
            if seen.length < prefix_len:
                chain = chain_hash(
                    tokens[seen.length :],
                    identity_key=key,
                    start_position=seen.length,
                    previous=chain,
                )
        else:
            chain = chain_hash(tokens, identity_key=key)
        fingerprint = self._fingerprint.of(tokens)
        self._progress[request_uid, token_offset] = _Progress(prefix_len, chain, key, fingerprint)
        self._progress.move_to_end((request_uid, token_offset))
        if len(self._progress) > self._capacity:
            self._progress.popitem(last=False)
        return chain
