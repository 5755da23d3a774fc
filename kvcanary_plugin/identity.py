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


@dataclass(frozen=True, slots=True)
class _Hashed:
    """Some tokens and the chain hash behind them."""

    tokens: Int64Array
    chain: int


class KnownPrefixes:
    """Chain hashes of prefixes admitted lately, for requests that begin with the same tokens.

    Comparing tokens takes a thirtieth of the time that hashing them takes, and leaves nothing to
    chance. Prefixes that begin alike share a place, which holds the longest ones used last.

    Args:
        max_tokens: bound of what is kept, 8 bytes each; the places used longest ago go first.
    """

    def __init__(self, *, max_tokens: int = 1 << 20) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._places: OrderedDict[tuple[int, bytes], list[_Hashed]] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """Tokens kept now."""
        return self._num_tokens

    def longest(self, tokens: Int64Array, key: int) -> tuple[int, int | None]:
        """(how many of the first ``tokens`` are known, chain hash behind them); (0, None): none."""
        place = (key, tokens[:_BEGINNING].tobytes())
        for known in self._places.get(place, ()):
            length = known.tokens.shape[0]
            if length <= tokens.shape[0] and np.array_equal(known.tokens, tokens[:length]):
                self._places.move_to_end(place)
                return length, known.chain
        return 0, None

    def add(self, tokens: Int64Array, key: int, chain: int) -> None:
        """Keep ``chain``, the hash behind ``tokens``; too few of them are not worth it."""
        count = tokens.shape[0]
        if not _BEGINNING <= count <= self._max_tokens:
            return
        place = (key, tokens[:_BEGINNING].tobytes())
        others = self._places.pop(place, [])
        kept = [_Hashed(tokens.copy(), chain), *others][:_PREFIXES_OF_A_PLACE]
        self._places[place] = sorted(kept, key=lambda known: -known.tokens.shape[0])
        self._num_tokens += count - sum(k.tokens.shape[0] for k in others[len(kept) - 1 :])
        while self._num_tokens > self._max_tokens:
            _, oldest = self._places.popitem(last=False)
            self._num_tokens -= sum(known.tokens.shape[0] for known in oldest)


# Tokens that prefixes of one place have in common.
_BEGINNING = 32
_PREFIXES_OF_A_PLACE = 4


@dataclass(slots=True)
class _Progress:
    length: int
    chain: int
    key: int
    fingerprint: int


class PrefixHasher:
    """Running chain hash per request over its own tokens, so that each token is hashed once.

    A request that comes in chunks is admitted several times; each time only the tokens behind the
    last admission are new. Of a new request, the tokens that it shares with one admitted lately are
    not hashed again either. Holds the most recently used ``capacity`` requests.
    """

    def __init__(self, *, capacity: int = 65536) -> None:
        self._progress: OrderedDict[tuple[int, int], _Progress] = OrderedDict()
        self._capacity = capacity
        self._fingerprint = Fingerprint()
        self._known = KnownPrefixes()

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
            chain = self._hash_of_new(tokens, key)
        fingerprint = self._fingerprint.of(tokens)
        self._progress[request_uid, token_offset] = _Progress(prefix_len, chain, key, fingerprint)
        self._progress.move_to_end((request_uid, token_offset))
        if len(self._progress) > self._capacity:
            self._progress.popitem(last=False)
        return chain

    def _hash_of_new(self, tokens: Int64Array, key: int) -> int:
        length, known = self._known.longest(tokens, key)
        if known is not None and length == tokens.shape[0]:
            return known
        chain = chain_hash(tokens[length:], identity_key=key, start_position=length, previous=known)
        self._known.add(tokens, key, chain)
        return chain
