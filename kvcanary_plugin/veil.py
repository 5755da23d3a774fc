"""What a report shows in place of token ids: keyed hashes, or the ids where that is allowed.

A chain hash follows from the tokens before it, so that two neighbouring ones give a token away to
whoever tries them all; identity keys follow from guessable names. They get the same treatment.
"""

from __future__ import annotations

import hashlib
import secrets
from functools import lru_cache
from typing import Final

_DIGEST_BYTES: Final = 8


class Veil:
    """Replaces values by keyed hashes: of one process, equal values stay equal, and no more.

    Args:
        transparent: show everything as it is.
        key: secret of the hashes; fresh and random by default, and never written anywhere.
    """

    def __init__(self, *, transparent: bool, key: bytes | None = None) -> None:
        self.is_transparent = transparent
        self._key = key if key is not None else secrets.token_bytes(32)
        self._hashed = lru_cache(maxsize=65536)(self._hash)

    def token(self, token: int) -> int:
        """What stands for a token id; -1 (unknown) stays."""
        return token if token < 0 else self._veiled(b"token", token)

    def chain(self, value: int) -> int:
        """What stands for a chain hash, a signed int64."""
        return self._veiled(b"chain", value)

    def identity(self, key: int) -> int:
        """What stands for an identity key, a signed int64; 0 (none) stays."""
        return 0 if key == 0 else self._veiled(b"identity", key)

    def _veiled(self, domain: bytes, value: int) -> int:
        return value if self.is_transparent else self._hashed(domain, value)

    def _hash(self, domain: bytes, value: int) -> int:
        digest = hashlib.blake2b(
            value.to_bytes(8, "little", signed=True),
            key=self._key,
            digest_size=_DIGEST_BYTES,
            person=domain,
        ).digest()
        # Not negative: -1 means "unknown" in every field that this goes to.
        return int.from_bytes(digest, "little") >> 1
