"""The hashes of the byte contract for Python ints and for int64 tensors, and the host chain hash.

An int64 tensor holds unsigned 64-bit values as two's complement; torch's int64 arithmetic wraps
modulo 2^64 just as the contract asks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvcanary_plugin.kernels.arguments import INTEGERS, check_vector, refuse
from kvcanary_plugin.kernels.backend import kernels_for
from kvcanary_plugin.kernels.consts import CANARY_CHAIN_ANCHOR, GOLDEN, U64_MASK

_CPU = torch.device("cpu")
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB


def to_signed(value: int) -> int:
    """The int64 that has the same 64 bits as ``value`` modulo 2^64."""
    value &= U64_MASK
    return value - (1 << 64) if value >> 63 else value


# ---- Python ints, unsigned -----------------------------------------------------------------------


def splitmix64(x: int) -> int:
    """The finaliser of splitmix64 of ``x`` modulo 2^64; unsigned."""
    x &= U64_MASK
    x = ((x ^ (x >> 30)) * _MULTIPLIER_1) & U64_MASK
    x = ((x ^ (x >> 27)) * _MULTIPLIER_2) & U64_MASK
    return x ^ (x >> 31)


def splitmix64_mix3(a: int, b: int, c: int) -> int:
    """One link of the chain: previous hash, token, position; unsigned."""
    return splitmix64(splitmix64(splitmix64(a) ^ (b & U64_MASK)) ^ (c & U64_MASK))


def chain_start(identity_key: int = 0) -> int:
    """The running hash before the first token of a sequence; unsigned."""
    return splitmix64(CANARY_CHAIN_ANCHOR ^ (identity_key & U64_MASK))


# ---- int64 tensors -------------------------------------------------------------------------------


def _shifted_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: the arithmetic one without the copies of the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def splitmix64_tensor(x: torch.Tensor) -> torch.Tensor:
    """:func:`splitmix64` of every element of an int64 tensor."""
    x = (x ^ _shifted_right(x, 30)) * to_signed(_MULTIPLIER_1)
    x = (x ^ _shifted_right(x, 27)) * to_signed(_MULTIPLIER_2)
    return x ^ _shifted_right(x, 31)


def splitmix64_mix3_tensor(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """:func:`splitmix64_mix3` element by element of int64 tensors."""
    return splitmix64_tensor(splitmix64_tensor(splitmix64_tensor(a) ^ b) ^ c)


def chain_start_tensor(identity_keys: torch.Tensor) -> torch.Tensor:
    """:func:`chain_start` of every key of an int64 tensor."""
    return splitmix64_tensor(identity_keys ^ to_signed(CANARY_CHAIN_ANCHOR))


def word_keys(source_index: int, num_words: int, device: torch.device) -> torch.Tensor:
    """``key(source_index, i)`` of the fold for the words i = 0 .. num_words - 1: int64."""
    words = torch.arange(1, num_words + 1, dtype=torch.int64, device=device)
    return words * to_signed(GOLDEN) + to_signed(splitmix64(source_index + 1))


# ---- the chain hash of a whole sequence on the host ----------------------------------------------


def chain_hash(
    tokens: npt.NDArray[np.integer] | torch.Tensor,
    *,
    identity_key: int = 0,
    start_position: int = 0,
    previous: int | None = None,
) -> int:
    """The running chain hash behind ``tokens``: what the next token would store as prev_hash.

    Args:
        tokens: int32 or int64 [n], a numpy array or a CPU tensor, contiguous.
        identity_key: key in the anchor of the chain; not used with ``previous``.
        start_position: position of ``tokens[0]``.
        previous: running hash before ``tokens[0]``; None starts a chain.

    Returns the hash as a signed int64. ValueError for tokens of another shape or dtype.
    """
    tensor = _host_tokens(tokens)
    kernels = kernels_for(_CPU)
    if kernels is None:
        return chain_hash_reference(
            tensor, identity_key=identity_key, start_position=start_position, previous=previous
        )
    return int(
        kernels.canary_chain_hash(
            tensor,
            to_signed(identity_key),
            start_position,
            0 if previous is None else to_signed(previous),
            previous is not None,
        )
    )


def chain_hash_reference(
    tokens: npt.NDArray[np.integer] | torch.Tensor,
    *,
    identity_key: int = 0,
    start_position: int = 0,
    previous: int | None = None,
) -> int:
    """:func:`chain_hash` in plain Python."""
    running = chain_start(identity_key) if previous is None else previous
    for position, token in enumerate(_host_tokens(tokens).tolist(), start=start_position):
        running = splitmix64_mix3(running, token, position)
    return to_signed(running)


def _host_tokens(tokens: npt.NDArray[np.integer] | torch.Tensor) -> torch.Tensor:
    if isinstance(tokens, np.ndarray):
        if tokens.dtype not in (np.int32, np.int64):
            raise refuse("tokens", "be int32 or int64", tokens.dtype)
        # A read-only array is fine here: nothing writes to it.
        tokens = torch.from_numpy(tokens if tokens.flags.writeable else tokens.copy())
    check_vector("tokens", tokens, device=_CPU, dtypes=INTEGERS)
    return tokens
