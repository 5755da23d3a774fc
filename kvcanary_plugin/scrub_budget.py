"""How much the scrub may do now: a share of the engine's time, or bytes a second."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from kvcanary_plugin.config.model import Scrub

# Shares of a step that may be saved up, when a chunk was smaller than its share.
_MOST_SHARES_SAVED = 4
# Time for which a budget in bytes a second is saved up.
_MOST_SECONDS_SAVED = 0.25
# Weight of a new measurement.
_LEARNING_RATE = 0.2
# A chunk is of usual size from this share of the recent ones' mean on, and far dearer from this
# multiple of their price on.
_USUAL_SIZE = 0.5
_FAR_DEARER = 2.0
# Assumed until measured, and slots that may be folded on that assumption.
_SECONDS_PER_BYTE = {"cpu": 1 / 1e9, "cuda": 1 / 200e9}
_SLOTS_UNMEASURED = {"cpu": 1, "cuda": 64}


class ScrubBudget:
    """An account in seconds (share of time) or bytes (bytes a second).

    Time that passes pays in, folding takes out. On a CPU a chunk takes out the time that it was
    measured to take, so that the share holds whatever the estimate was; on a GPU it is paid in
    advance at the measured price, and what turns out to be free slots is paid back.
    """

    def __init__(self, settings: Scrub, *, device_type: str) -> None:
        self._seconds_per_byte = _SECONDS_PER_BYTE[device_type]
        self._most_slots: int | None = _SLOTS_UNMEASURED[device_type]
        self._recent_bytes = self._recent_seconds = 0.0
        self.reconfigure(settings)

    def reconfigure(self, settings: Scrub) -> None:
        """Take over another budget; what was saved under the old one is dropped."""
        share, rate = settings.percent_of_step_time, settings.bytes_per_second
        self._is_share = rate is None
        self._income = float(rate) if rate is not None else (share or 0.0) / 100.0
        self._credit = 0.0

    @property
    def is_off(self) -> bool:
        """Whether nothing may ever be done."""
        return self._income == 0.0

    @property
    def is_share(self) -> bool:
        """Whether the budget is a share of time."""
        return self._is_share

    def seconds_of(self, num_bytes: int) -> float:
        """What folding ``num_bytes`` takes, as measured so far."""
        return num_bytes * self._seconds_per_byte

    def earn(self, seconds: float, *, bytes_per_slot: int) -> None:
        """Time has passed: of a step (share of time), or since the last call (bytes a second).

        What is saved up is limited, but never below the price of one slot of ``bytes_per_slot``.
        """
        if self._is_share:
            income = self._income * max(seconds, 0.0)
            most = _MOST_SHARES_SAVED * income
        else:
            income = self._income * min(max(seconds, 0.0), _MOST_SECONDS_SAVED)
            most = self._income * _MOST_SECONDS_SAVED
        self._credit = min(self._credit + income, max(most, self._price(bytes_per_slot)))

    def affords(self, bytes_per_slot: int) -> int:
        """Slots that may be folded now."""
        slots = max(int(self._credit / self._price(bytes_per_slot)), 0)
        return slots if self._most_slots is None else min(slots, self._most_slots)

    def spend(self, slots: int, bytes_per_slot: int) -> None:
        """Takes out the price of ``slots``; negative pays back."""
        self._credit -= slots * self._price(bytes_per_slot)

    def spend_time(self, seconds: float) -> None:
        """Takes out time that went into something else than folding."""
        if self._is_share:
            self._credit -= seconds

    def spend_measured(self, slots: int, bytes_per_slot: int, seconds: float) -> None:
        """Takes out what folding ``slots`` took, and learns the price from it."""
        if slots > 0:
            self.learn(slots * bytes_per_slot, seconds)
        self._credit -= seconds if self._is_share else slots * bytes_per_slot

    def learn(self, num_bytes: int, seconds: float) -> None:
        """``num_bytes`` were folded in ``seconds``, launch included.

        The price is that of the last chunks together, so that what is paid for many of them is what
        they take. A chunk of usual size that takes far longer than that counts alone at once: the
        next one must not be larger than it may be.
        """
        is_unmeasured = self._most_slots is not None
        is_usual = num_bytes >= _USUAL_SIZE * self._recent_bytes * _LEARNING_RATE
        is_far_dearer = seconds > _FAR_DEARER * self.seconds_of(num_bytes)
        keep = 0.0 if is_unmeasured or (is_usual and is_far_dearer) else 1.0 - _LEARNING_RATE
        self._recent_bytes = keep * self._recent_bytes + num_bytes
        self._recent_seconds = keep * self._recent_seconds + seconds
        self._seconds_per_byte = self._recent_seconds / self._recent_bytes
        self._most_slots = None

    def _price(self, bytes_per_slot: int) -> float:
        return self.seconds_of(bytes_per_slot) if self._is_share else float(bytes_per_slot)


class DeviceTimer:
    """What a step and a chunk take on a GPU, sampled now and then. Nothing is waited for.

    Events and counts of a sample lie on the stream around its chunk; a later call finds them
    complete and reads them.
    """

    _EVERY_STEPS = 8

    def __init__(self) -> None:
        cuda: Any = torch.cuda
        self._step_begin, self._chunk_begin, self._chunk_end, self._complete = (
            cuda.Event(enable_timing=True) for _ in range(4)
        )
        self._counts = torch.zeros(2, dtype=torch.int64, pin_memory=True)
        self._bytes_per_slot = 0
        self._steps_until_sample = 0
        self._step_is_sampled = False
        self._awaits_result = False
        self._step_seconds = 0.0
        self._not_counted = 0.0

    def step_begins(self, *, may_sample: bool) -> None:
        """A forward begins on the current stream; a sample costs the host some microseconds."""
        self._steps_until_sample -= 1
        is_due = self._steps_until_sample < 0 and not self._awaits_result
        self._step_is_sampled = may_sample and is_due
        if self._step_is_sampled:
            self._step_begin.record()

    def chunk(self, launch: Callable[[], None], counter: torch.Tensor, bytes_per_slot: int) -> None:
        """Runs ``launch`` on the current stream, and samples step and chunk if it is their turn.

        Args:
            launch: launches the chunk; in the first step there may be nothing to launch.
            counter: int64 [1] on the device; slots folded so far.
            bytes_per_slot: bytes of each of them.
        """
        if not self._step_is_sampled:
            launch()
            return
        self._step_is_sampled = False
        self._steps_until_sample = self._EVERY_STEPS
        self._bytes_per_slot = bytes_per_slot
        self._chunk_begin.record()
        self._counts[:1].copy_(counter, non_blocking=True)
        launch()
        self._chunk_end.record()
        self._counts[1:].copy_(counter, non_blocking=True)
        self._complete.record()
        self._awaits_result = True

    def step_time(self, elapsed: float) -> float:
        """Time of the step that ends, ``elapsed`` seconds after the one before.

        What steps take by the samples, but over some steps no more than has elapsed: the engine
        launches ahead of the device, and a sample may have met a longer step than most.
        """
        most = _MOST_SHARES_SAVED * self._step_seconds
        self._not_counted = min(self._not_counted + elapsed, most)
        seconds = min(self._not_counted, self._step_seconds)
        self._not_counted -= seconds
        return seconds

    def learn(self, budget: ScrubBudget) -> None:
        """Take over the last sample if the device has got that far."""
        if not self._awaits_result or not self._complete.query():
            return
        self._awaits_result = False
        seconds = self._step_begin.elapsed_time(self._chunk_begin) / 1e3
        known = self._step_seconds
        self._step_seconds = known + _LEARNING_RATE * (seconds - known) if known else seconds
        folded = int(self._counts[1]) - int(self._counts[0])
        if folded > 0:
            chunk_seconds = self._chunk_begin.elapsed_time(self._chunk_end) / 1e3
            budget.learn(folded * self._bytes_per_slot, chunk_seconds)


class Prepaid:
    """Slots that launches were paid for, and what of it the device has done by now.

    A launch of a range is paid as if every slot were live; the next launch publishes how many
    were, and the rest is paid back.
    """

    def __init__(self) -> None:
        self._launches: deque[tuple[int, int]] = deque()  # (launches, slots paid), cumulative
        self._paid_slots = 0
        self._num_launches = 0
        self._paid_back = 0

    def paid(self, slots: int) -> None:
        """One more launch, paid for ``slots``."""
        self._num_launches += 1
        self._paid_slots += slots
        self._launches.append((self._num_launches, self._paid_slots))

    def owed(self, *, launches: int, folded: int) -> int:
        """Slots to pay back, now that ``launches`` launches are known to have folded ``folded``."""
        known = None
        while self._launches and self._launches[0][0] <= launches:
            known = self._launches.popleft()
        if known is None:
            return 0
        owed = known[1] - folded - self._paid_back
        self._paid_back += owed
        return owed
