"""The ring reader takes every row once and counts exactly what it came too late for."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvcanary_plugin.kernels.consts import VIOLATION_FIELDS, ViolationField
from kvcanary_plugin.ring import RingReader

SEQUENCE = ViolationField.SEQUENCE
WRAP = 1 << 32


class Model:
    """A ring written as the contract says: violation n to row (n mod 2^32) % capacity."""

    def __init__(self, capacity: int) -> None:
        self.ring = torch.zeros((capacity, VIOLATION_FIELDS), dtype=torch.int64)
        self.total = 0

    def write(self, count: int) -> None:
        capacity = self.ring.shape[0]
        # All but the last rows are overwritten within the burst; at a wrap of the index the order
        # of the rows changes, hence twice the capacity.
        start = max(self.total, self.total + count - 2 * capacity)
        for n in range(start, self.total + count):
            row = self.ring[n % WRAP % capacity]
            row[:SEQUENCE] = n
            row[SEQUENCE] = n % WRAP + 1
        self.total += count

    def held(self) -> set[int]:
        return {int(row[0]) for row in self.ring if row[SEQUENCE] != 0}


@given(
    capacity=st.integers(1, 70),
    bursts=st.lists(st.integers(0, 200), min_size=1, max_size=12),
)
@example(capacity=1, bursts=[1, 1, 5])
@example(capacity=64, bursts=[64, 64, 65])
def test_rows_read_and_dropped_add_up_to_rows_written(capacity: int, bursts: list[int]) -> None:
    model = Model(capacity)
    reader = RingReader(model.ring)
    read: list[int] = []
    dropped = 0
    for burst in bursts:
        unread = set(read)
        model.write(burst)
        batch = reader.read()
        values = batch.rows[:, 0].tolist()
        assert values == sorted(model.held() - unread), "oldest first, none twice, none missed"
        read += values
        dropped += batch.dropped
        assert len(read) + dropped == model.total


@given(
    capacity=st.integers(1, 70),
    before_wrap=st.integers(0, 100),
    bursts=st.lists(st.integers(0, 200), min_size=1, max_size=6),
    second_wrap=st.booleans(),
)
@example(capacity=64, before_wrap=0, bursts=[1], second_wrap=False)
@example(capacity=3, before_wrap=1, bursts=[1, 1, 1], second_wrap=True)
def test_wrap_of_the_32_bit_index_loses_no_count(
    capacity: int, before_wrap: int, bursts: list[int], second_wrap: bool
) -> None:
    """Also for capacities that do not divide 2^32, where the wrap shifts the rows."""
    to_wrap = [WRAP // 2, WRAP // 2 - before_wrap]
    model = Model(capacity)
    reader = RingReader(model.ring)
    accounted = 0
    for burst in [*to_wrap, *bursts, *(to_wrap if second_wrap else []), *bursts]:
        model.write(burst)
        batch = reader.read()
        assert np.all(np.diff(batch.rows[:, 0]) > 0)
        accounted += len(batch.rows) + batch.dropped
        assert accounted == model.total


def test_row_that_is_being_overwritten_waits_for_the_next_read() -> None:
    model = Model(4)
    reader = RingReader(model.ring)
    model.write(4)
    assert len(reader.read().rows) == 4
    model.ring[0, SEQUENCE] = 0
    model.ring[0, 0] = 4
    assert len(reader.read().rows) == 0
    model.write(1)
    batch = reader.read()
    assert batch.rows[:, 0].tolist() == [4]
    assert batch.dropped == 0


def test_row_that_changes_right_after_its_copy_waits_for_the_next_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its fields may have been copied after its sequence, so they prove nothing."""
    model = Model(4)
    reader = RingReader(model.ring)
    model.write(4)

    class RowOneMoves:
        def copy(self) -> npt.NDArray[np.int64]:
            return model.ring[:, SEQUENCE].numpy().copy()

        def __getitem__(self, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
            return np.where(rows == 1, 0, rows + 1)

    with monkeypatch.context() as patch:
        patch.setattr(reader, "_sequences", RowOneMoves())
        assert reader.read().rows[:, 0].tolist() == [0, 2, 3]
    batch = reader.read()
    assert (batch.rows[:, 0].tolist(), batch.dropped) == ([1], 0)


def test_rows_behind_one_that_never_completes_are_still_read() -> None:
    """A CUDA context that dies inside a row must not hide the others."""
    model = Model(8)
    reader = RingReader(model.ring)
    model.write(5)
    model.ring[2, SEQUENCE] = 0
    assert reader.read().rows[:, 0].tolist() == [0, 1, 3, 4]


def test_later_row_visible_before_an_earlier_one_is_not_a_drop() -> None:
    model = Model(8)
    reader = RingReader(model.ring)
    model.write(3)
    first = model.ring[1].clone()
    model.ring[1] = 0
    assert reader.read().dropped == 0
    model.ring[1] = first
    batch = reader.read()
    assert (batch.rows[:, 0].tolist(), batch.dropped) == ([1], 0)


def test_rows_are_copies() -> None:
    model = Model(4)
    reader = RingReader(model.ring)
    model.write(1)
    rows = reader.read().rows
    model.ring[0, 0] = 99
    assert rows[0, 0] == 0


@pytest.mark.parametrize(
    ("ring", "message"),
    [
        (torch.zeros((4, 15), dtype=torch.int64), "shape"),
        (torch.zeros((0, 16), dtype=torch.int64), "shape"),
        (torch.zeros(16, dtype=torch.int64), "shape"),
        (torch.zeros((4, 16), dtype=torch.int32), "int64"),
        (torch.zeros((4, 32), dtype=torch.int64)[:, ::2], "contiguous"),
        (torch.zeros((4, 16), dtype=torch.int64, device="meta"), "meta"),
    ],
)
def test_tensor_that_is_no_ring_is_refused(ring: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RingReader(ring)


_WRITER = """
import os, sys
import numpy as np
path, capacity, total, batch, enough = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
ring = np.memmap(path, dtype=np.int64, mode="r+", shape=(capacity, 16))
print("ready", flush=True)
sys.stdin.readline()
written = 0
while written < total or not os.path.exists(enough):
    for start in range(written, written + total, batch):
        n = np.arange(start, start + batch)
        rows = n % capacity
        ring[rows, 15] = 0
        ring[rows, :15] = n[:, None]
        ring[rows, 15] = n + 1
    written += total
print(written, flush=True)
"""


def test_no_count_is_lost_against_a_process_that_writes_faster_than_it_is_read(
    tmp_path: Path,
) -> None:
    """Eight million rows, and as many again until the reader has met and lost some at work."""
    capacity, total, batch_size = 4096, 8_192_000, 512
    path, enough = tmp_path / "ring", tmp_path / "enough"
    path.write_bytes(bytes(capacity * VIOLATION_FIELDS * 8))
    ring = torch.from_file(
        str(path), shared=True, size=capacity * VIOLATION_FIELDS, dtype=torch.int64
    ).view(capacity, VIOLATION_FIELDS)
    reader = RingReader(ring)
    with subprocess.Popen(
        [
            *(sys.executable, "-c", _WRITER),
            *map(str, (path, capacity, total, batch_size, enough)),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        writer.stdin.write("go\n")
        writer.stdin.flush()
        read = dropped = reads_while_writing = 0
        latest = -1
        finished = False
        try:
            while not finished:
                finished = writer.poll() is not None
                batch = reader.read()
                values = batch.rows[:, : SEQUENCE + 1]
                assert np.all(values[:, :SEQUENCE] == values[:, :1]), "a row torn between writes"
                assert np.all(values[:, SEQUENCE] == values[:, 0] + 1)
                assert len(np.unique(values[:, 0])) == len(values)
                read += len(batch.rows)
                dropped += batch.dropped
                if len(values) and values[-1, 0] > latest:
                    latest = int(values[-1, 0])
                    reads_while_writing += not finished
                if reads_while_writing > 3 and dropped:
                    enough.touch()
        finally:
            enough.touch()
        written = int(writer.stdout.read())
    assert read + dropped == written
    assert latest == written - 1


@pytest.mark.usefixtures("threads_alternate")
def test_no_count_is_lost_against_a_thread() -> None:
    model = Model(256)
    reader = RingReader(model.ring)
    writer = threading.Thread(target=lambda: [model.write(97) for _ in range(50)])
    writer.start()
    read = dropped = 0
    while writer.is_alive():
        batch = reader.read()
        read, dropped = read + len(batch.rows), dropped + batch.dropped
    batch = reader.read()
    assert read + len(batch.rows) + dropped + batch.dropped == model.total == 50 * 97
