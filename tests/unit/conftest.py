"""What the unit tests share: a writer of violation rows and a way to read metrics back."""

from __future__ import annotations

from collections.abc import Callable

import prometheus_client
import pytest
import torch

from kvcanary_plugin.kernels.consts import (
    VIOLATION_FIELDS,
    FailReason,
    LaunchTag,
    SlotState,
    ViolationField,
    pack_kernel_kind,
)


class RingWriter:
    """Writes violation rows as the kernels do."""

    def __init__(self, capacity: int) -> None:
        self.ring = torch.zeros((capacity, VIOLATION_FIELDS), dtype=torch.int64)
        self.written = 0

    def put(
        self,
        reasons: FailReason = FailReason.VERIFY_CHAIN_HASH,
        *,
        tag: LaunchTag = LaunchTag.VERIFY,
        group_index: int = 0,
        **fields: int,
    ) -> None:
        """Stores one row; ``fields`` are named as in ViolationField, lower case."""
        row = {
            "kernel_kind": pack_kernel_kind(tag, group_index),
            "slot": 8123,
            "position": 77,
            "stored_token": 31337,
            "expected_token": 42424,
            "stored_chain_hash": -5,
            "expected_aux": 99,
            "fail_reason_bits": int(reasons),
            "step": 1043,
            "request_uid": 5,
            "writer_uid": 6,
            "writer_step": 1042,
            "batch_row": 3,
            "slot_state": int(SlotState.SEALED),
            "expected_position": 77,
            "sequence": self.written + 1,
        } | fields
        index = self.written % self.ring.shape[0]
        self.ring[index] = torch.tensor([row[field.name.lower()] for field in ViolationField])
        self.written += 1


@pytest.fixture
def ring_writer() -> RingWriter:
    return RingWriter(capacity=64)


@pytest.fixture
def make_ring_writer() -> Callable[[int], RingWriter]:
    return RingWriter


@pytest.fixture
def registry() -> prometheus_client.CollectorRegistry:
    return prometheus_client.CollectorRegistry()


@pytest.fixture
def sample(registry: prometheus_client.CollectorRegistry) -> Callable[..., float]:
    """Value of a series of rank 0; fails when the series does not exist."""

    def read(name: str, **labels: str) -> float:
        ranks = {"engine": "test", "tp_rank": "0", "pp_rank": "0", "dp_rank": "0"}
        value = registry.get_sample_value(name, ranks | labels)
        assert value is not None, f"no series {name} {labels}"
        return value

    return read
