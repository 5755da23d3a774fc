"""The scrub: every live slot in turn, all sealed bytes folded again and compared with the record.

It walks the slot numbers of each group round and round. Slots whose bytes are not sealed (free, or
being written) cost one read of their state; prefix-cache residents are sealed like any others. No
list of slots is kept: memory does not grow with the pool.

Each slot that differs is looked at twice. The engine may hand a free slot to a load or a transfer
that already stores into it while the event that says so still waits for the next forward: a first
look could then see new bytes under the old record. So the first look only makes suspects. They are
compared again once every event queued before has been applied; what differs then is a violation.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvcanary_plugin.config.model import Scrub
from kvcanary_plugin.gate import EngineGate
from kvcanary_plugin.guard import GroupGuard
from kvcanary_plugin.kernels import (
    LaunchTag,
    SlotState,
    ViolationField,
    launch_canary_scrub_kernel,
    launch_canary_scrub_range_kernel,
)
from kvcanary_plugin.kernels.reference import STATE_MASK
from kvcanary_plugin.ring import RingReader
from kvcanary_plugin.scrub_budget import DeviceTimer, Prepaid, ScrubBudget

logger = logging.getLogger(__name__)

# The engine counts as idle after this time without a forward.
_IDLE_SECONDS = 0.1
# An idle turn is cut into pieces: a forward that arrives waits for one of them at most.
_IDLE_PIECE_SECONDS = 0.001
# States that a CPU looks through at once for the next live slots.
_MOST_STATES = 65536
# Suspects that wait for their second look; what is beyond is found again in the next turn.
_MOST_SUSPECTS = 4096
# Second looks in one go: the budget does not hold them back.
_SECOND_LOOKS = 64
# Places of a turn at which the time is remembered.
_MARKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubReading:
    """How far the scrub of a group has come.

    Fields:
        cycle_seconds: time from the end of the last turn but one to the end of the last; 0 before
            the first has ended.
        oldest_unchecked_seconds: no live slot has gone without a check for longer than this.
        progress: share of the slots that the running turn has passed.
    """

    cycle_seconds: float = 0.0
    oldest_unchecked_seconds: float = 0.0
    progress: float = 0.0


class Turn:
    """Where the scrub of one pool stands, and when it was where in the turn before.

    Args:
        num_slots: slots of the pool.
        now: seconds.
    """

    def __init__(self, *, num_slots: int, now: float) -> None:
        self.position = 0
        self._num_slots = num_slots
        self._ended_at = now
        self._cycle_seconds = 0.0
        # (slot, time): in that turn, everything below the slot had been passed at that time.
        self._marks: list[tuple[int, float]] = [(0, now)]
        self._marks_before: list[tuple[int, float]] = [(0, now)]

    def advance(self, end: int, now: float) -> bool:
        """Everything below ``end`` has been passed; whether that ends the turn."""
        self.position = end
        if end - self._marks[-1][0] >= self._num_slots / _MARKS:
            self._marks.append((end, now))
        if end < self._num_slots:
            return False
        self._cycle_seconds = now - self._ended_at
        self._ended_at = now
        self._marks_before, self._marks = self._marks, [(0, now)]
        self.position = 0
        return True

    def reading(self, now: float) -> ScrubReading:
        """The turn as gauges show it."""
        # The slots next in line have waited longest: since the last mark at or below them.
        passed_at = max(time for slot, time in self._marks_before if slot <= self.position)
        return ScrubReading(
            cycle_seconds=self._cycle_seconds,
            oldest_unchecked_seconds=now - passed_at,
            progress=self.position / self._num_slots,
        )


class _Pool:
    """One set of slots that the scrub walks: a group, or several that share their slots."""

    def __init__(self, members: Sequence[GroupGuard], now: float) -> None:
        self.members = tuple(members)
        self.guard = members[0]
        self.bytes_per_slot = self.guard.sealed_bytes_per_slot
        self.num_slots = self.guard.group.num_slots
        self.turn = Turn(num_slots=self.num_slots, now=now)
        self.prepaid = Prepaid()
        self.suspects: deque[int] = deque(maxlen=_MOST_SUSPECTS)
        self._found = RingReader(self.guard.suspects.ring)
        self._found_count = 0
        self._sequences = self.guard.suspects.ring.numpy()[:, ViolationField.SEQUENCE]
        state = self.guard.slots.state
        self._states: npt.NDArray[np.int32] | None = (
            state.numpy() if state.device.type == "cpu" else None
        )

    def range_with(self, live_slots: int) -> tuple[int, int]:
        """(end, live slots) of a range from the turn's position on with at most ``live_slots``.

        On a CPU the states are looked through; elsewhere every slot counts as live.
        """
        first = self.turn.position
        if self._states is None:
            end = min(first + live_slots, self.num_slots)
            return end, end - first
        end = min(first + min(max(4 * live_slots, 256), _MOST_STATES), self.num_slots)
        states = self._states[first:end] & STATE_MASK
        live = np.flatnonzero((states == SlotState.SEALED) | (states == SlotState.EXTERNAL))
        if len(live) > live_slots:
            return first + int(live[live_slots - 1]) + 1, live_slots
        return end, len(live)

    def fold_to(self, end: int, step: int) -> None:
        """Launches the first look at the slots from the turn's position to ``end``."""
        launch_canary_scrub_range_kernel(
            context=self.guard.context(LaunchTag.SCRUB),
            first_slot=self.turn.position,
            num_slots=end - self.turn.position,
            step=step,
        )

    def folded_so_far(self) -> int:
        """Slots that first looks have folded; waits for the device."""
        return int(self.guard.context(LaunchTag.SCRUB).slot_run_counter.item())

    def collect_suspects(self) -> None:
        """Takes what first looks have found by now."""
        next_row = self._found_count % self._found.capacity
        if self._sequences[next_row] != (self._found_count + 1) % (1 << 32):
            return
        batch = self._found.read()
        self._found_count += len(batch.rows) + batch.dropped
        self.suspects.extend(batch.rows[:, ViolationField.SLOT].tolist())

    def look_again(self, step: int) -> None:
        """Launches the second look at the suspects; what differs now is a violation."""
        if not self.suspects:
            return
        slots = [self.suspects.popleft() for _ in range(min(len(self.suspects), _SECOND_LOOKS))]
        device = self.guard.group.device
        on_host = torch.tensor(slots, dtype=torch.int64, pin_memory=device.type == "cuda")
        launch_canary_scrub_kernel(
            context=self.guard.scrub_second_look,
            slots=on_host.to(device, non_blocking=True),
            num_valid=torch.full((1,), len(slots), dtype=torch.int32, device=device),
            step=step,
        )


class Scrubber:
    """Walks the slots of all groups within a budget: after each forward, and on an idle engine.

    :meth:`step_begins` and :meth:`after_forward` belong to the thread of the engine's forwards,
    :meth:`on_idle` to any one other thread; the gate keeps them apart.

    Args:
        guards: the groups.
        settings: the budget.
        gate: keeps idle turns and forwards apart.
        apply_events: makes the slot events that are queued now take effect, before an idle turn
            compares anything.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        guards: Sequence[GroupGuard],
        settings: Scrub,
        gate: EngineGate,
        apply_events: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._gate = gate
        self._apply_events = apply_events
        self._clock = clock
        now = clock()
        pools, self.left_out = scrubbed_pools(guards)
        for name, reason in self.left_out.items():
            logger.warning("kvcanary: group %s is left out of the scrub: %s", name, reason)
        self._pools = [_Pool(members, now) for members in pools]
        self._turn_of = 0  # index of the pool that is being walked
        device = guards[0].group.device
        self._budget = ScrubBudget(settings, device_type=device.type)
        self._idle_budget = ScrubBudget(settings, device_type=device.type)
        self._timer = DeviceTimer() if device.type == "cuda" else None
        self._earned_at = self._idle_earned_at = self._step_began_at = now
        self._billed = 0.0  # seconds of this step that its chunks have paid for
        self._step = 0

    def reconfigure(self, settings: Scrub) -> None:
        """Take over another budget, from any thread."""
        self._budget.reconfigure(settings)
        self._idle_budget.reconfigure(settings)

    def step_begins(self) -> None:
        """A forward begins: what the time of a step is counted from."""
        self._step_began_at = self._clock()
        if self._timer is not None:
            self._timer.step_begins(may_sample=not self._budget.is_off)

    def after_forward(self, step: int) -> None:
        """Everything of forward ``step`` is sealed: second looks, and the budget of this step."""
        self._step = step
        if self._budget.is_off or not self._pools or self._graph_is_captured():
            return
        began, self._billed = self._clock(), 0.0
        self._earn()
        self._look_again()
        if self._timer is None:
            self._spend_measured()
        else:
            self._spend_in_advance(self._timer)
        self._collect_suspects()
        if self._timer is None:
            self._budget.spend_time(self._clock() - began - self._billed)

    def on_idle(self) -> None:
        """If the engine is idle, do what the budget allows for the time since the last call."""
        now = self._clock()
        elapsed, self._idle_earned_at = now - self._idle_earned_at, now
        if self._idle_budget.is_off or not self._pools:
            return
        if not self._gate.engine_left_before(_IDLE_SECONDS):
            return
        budget = self._idle_budget
        budget.earn(elapsed, bytes_per_slot=self._pool.bytes_per_slot)
        if not self._idle_piece(self._look_again):
            return
        walked = [0]

        def piece() -> None:
            walked[0] += self._measured_chunk(budget, most_seconds=_IDLE_PIECE_SECONDS)

        while walked[0] < self._all_slots and budget.affords(self._pool.bytes_per_slot) > 0:
            if not self._idle_piece(piece):
                return
        self._idle_piece(self._collect_suspects)

    def readings(self) -> dict[str, ScrubReading]:
        """How far the scrub has come, by group; from any thread."""
        now = self._clock()
        return {
            guard.group.name: pool.turn.reading(now)
            for pool in self._pools
            for guard in pool.members
        }

    # --- looking --------------------------------------------------------------------------------

    @property
    def _pool(self) -> _Pool:
        return self._pools[self._turn_of]

    @property
    def _all_slots(self) -> int:
        return sum(pool.num_slots for pool in self._pools)

    def _look_again(self) -> None:
        for pool in self._pools:
            pool.look_again(self._step)

    def _collect_suspects(self) -> None:
        for pool in self._pools:
            pool.collect_suspects()

    def _advance(self, pool: _Pool, end: int) -> None:
        if pool.turn.advance(end, self._clock()):
            self._turn_of = (self._turn_of + 1) % len(self._pools)

    # --- spending -------------------------------------------------------------------------------

    def _earn(self) -> None:
        now = self._clock()
        elapsed, self._earned_at = now - self._earned_at, now
        seconds = elapsed
        if self._budget.is_share and self._timer is None:
            seconds = now - self._step_began_at
        elif self._budget.is_share and self._timer is not None:
            self._timer.learn(self._budget)
            seconds = self._timer.step_time(elapsed)
        self._budget.earn(seconds, bytes_per_slot=self._pool.bytes_per_slot)

    def _spend_measured(self) -> None:
        """Chunks until the budget is used up, each slot at most once."""
        walked = 0
        while walked < self._all_slots and self._budget.affords(self._pool.bytes_per_slot) > 0:
            walked += self._measured_chunk(self._budget)

    def _measured_chunk(self, budget: ScrubBudget, *, most_seconds: float | None = None) -> int:
        """One launch, paid for by the time it took; returns the slots it passed."""
        pool = self._pool
        slots = budget.affords(pool.bytes_per_slot)
        if most_seconds is not None:
            slots = min(slots, int(most_seconds / budget.seconds_of(pool.bytes_per_slot)))
        began, first = self._clock(), pool.turn.position
        end, live = pool.range_with(max(slots, 1))
        folded = 0
        if live > 0:
            before = pool.folded_so_far()
            pool.fold_to(end, self._step)
            folded = pool.folded_so_far() - before
            pool.prepaid.paid(folded)
        self._advance(pool, end)
        seconds = self._clock() - began
        budget.spend_measured(folded, pool.bytes_per_slot, seconds)
        self._billed += seconds
        return end - first

    def _spend_in_advance(self, timer: DeviceTimer) -> None:
        """One launch on the engine's stream, paid for as if every slot of it were live."""
        pool = self._pool
        context = pool.guard.context(LaunchTag.SCRUB)
        owed = pool.prepaid.owed(
            launches=pool.guard.launches_run(LaunchTag.SCRUB),
            folded=pool.guard.slots_run(LaunchTag.SCRUB),
        )
        self._budget.spend(-owed, pool.bytes_per_slot)
        slots = self._budget.affords(pool.bytes_per_slot)
        end, slots = pool.range_with(slots)

        def launch() -> None:
            if slots > 0:
                pool.fold_to(end, self._step)
                pool.prepaid.paid(slots)

        timer.chunk(launch, context.slot_run_counter, pool.bytes_per_slot)
        self._budget.spend(slots, pool.bytes_per_slot)
        if slots > 0:
            self._advance(pool, end)

    # --- keeping out of the way -----------------------------------------------------------------

    def _idle_piece(self, work: Callable[[], None]) -> bool:
        """Runs ``work`` unless a forward has come; whether it ran."""
        with self._gate.idle_turn() as engine_is_idle:
            if not engine_is_idle or not self._gate.engine_left_before(_IDLE_SECONDS):
                return False
            self._apply_events()
            work()
        self._earned_at = self._clock()
        return True

    def _graph_is_captured(self) -> bool:
        """A captured launch would walk the same slots at every replay."""
        return self._timer is not None and torch.cuda.is_current_stream_capturing()


def scrubbed_pools(
    guards: Sequence[GroupGuard],
) -> tuple[list[list[GroupGuard]], dict[str, str]]:
    """What to walk: guards by the slots they share, and group name -> why it is left out.

    A group of which nothing is sealed is in neither.
    """
    by_records: dict[int, list[GroupGuard]] = {}
    for guard in guards:
        by_records.setdefault(id(guard.slot_records), []).append(guard)
    pools: list[list[GroupGuard]] = []
    left_out: dict[str, str] = {}
    for sharing in by_records.values():
        members = [guard for guard in sharing if guard.sealed_bytes_per_slot > 0]
        reason = _why_left_out(members)
        if reason is not None:
            left_out |= dict.fromkeys((guard.group.name for guard in members), reason)
        elif members:
            pools.append(members)
    return pools, left_out


def _why_left_out(members: Sequence[GroupGuard]) -> str | None:
    if any(
        not guard.group.freed_slots_keep_bytes and not guard.group.tracks_allocation
        for guard in members
    ):
        return "others use the memory of its free slots, and no allocator events say which are free"
    # Nothing says which of the groups sealed a slot, so each of them has to fold it alike.
    if len({_strips(guard) for guard in members}) > 1:
        return "groups that share its slots have other strips of K/V per slot"
    return None


def _strips(guard: GroupGuard) -> tuple[tuple[int, ...], ...]:
    return tuple(
        (
            source.tensor.data_ptr(),
            source.tensor.stride(0) * source.tensor.element_size(),
            source.page_size,
            source.num_bytes_per_token,
            source.read_bytes,
        )
        for source in guard.group.sources
    )
