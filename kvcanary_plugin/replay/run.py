"""One run of the recorded window."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvcanary_plugin.forward import ForwardStep
from kvcanary_plugin.incident_file import Forward
from kvcanary_plugin.kernels import launch_canary_scrub_kernel
from kvcanary_plugin.kernels.consts import PADDING_SLOT
from kvcanary_plugin.kernels.hashes import splitmix64_mix3, to_signed
from kvcanary_plugin.replay.before_window import put_what_stood_before
from kvcanary_plugin.replay.by_hand import ByHand, HandMadeChanges
from kvcanary_plugin.replay.case import Case
from kvcanary_plugin.replay.events import apply_event
from kvcanary_plugin.replay.forwards import put_rows_of, step_of
from kvcanary_plugin.replay.small_engine import SmallEngine
from kvcanary_plugin.ring import RingReader
from kvcanary_plugin.violations import RequestNames, Violation


class Run:
    """An engine of its own, and the window's events and forwards through it."""

    def __init__(self, case: Case, by_hand: ByHand) -> None:
        self._case = case
        self._by_hand = by_hand
        self._engine = SmallEngine(case)
        self._ring = RingReader(self._engine.monitor.sink.ring)
        self._changes = HandMadeChanges(self._engine)
        self.seen: list[Violation] = []
        put_what_stood_before(self._engine)

    @property
    def changes(self) -> tuple[str, ...]:
        """What had been changed by hand, in words."""
        return tuple(self._changes.made)

    def run(self) -> Violation | None:
        """The violation at the root's place, if it comes."""
        root = self._case.root
        for forward in self._case.evidence.window:
            for event in forward.events:
                apply_event(self._engine, event)
            violations = self._forward(forward)
            if forward.step == root.step:
                self.seen = [v for v in violations if v.request_uid == root.request_uid]
                return next((v for v in violations if self._is_root(v)), None)
        return None

    def _is_root(self, v: Violation) -> bool:
        root = self._case.root
        return (v.phase, v.group, v.slot, v.position, v.expected_position) == (
            root.phase,
            root.group,
            root.slot,
            root.position,
            root.expected_position,
        ) and set(root.checks) <= set(v.checks)

    def _forward(self, forward: Forward) -> list[Violation]:
        root, monitor = self._case.root, self._engine.monitor
        is_the_one = forward.step == root.step
        for part in forward.parts:
            put_rows_of(self._engine, part)
        if is_the_one:
            self._tell_the_oracle()
            if root.phase != "reverify":
                self._changes.make(self._by_hand)
        step = step_of(self._engine, forward)
        monitor.before_forward(step)
        self._bind_chains(forward)
        if is_the_one and root.phase == "reverify":
            self._changes.make(self._by_hand)
        self._store_bytes(step)
        monitor.after_forward()
        if is_the_one and root.phase == "scrub":
            self._scrub_root()
        return self._violations()

    def _tell_the_oracle(self) -> None:
        """What the sampler had chosen is not recorded; the violation names what it expected."""
        engine, root, reader = self._engine, self._case.root, self._case.reader
        if root.expected_token is None or reader is None:
            return
        offset = self._case.root_group.token_offset if root.phase == "verify" else 0
        position = root.read_position + offset
        row = engine.rows.here(reader.uid, reader.request_row)
        if 0 <= position < engine.width and row < engine.rows.count:
            engine.monitor.record_sampled(
                torch.tensor([row]),
                torch.tensor([position]),
                torch.tensor([engine.tokens.here(root.expected_token)]),
            )

    def _bind_chains(self, forward: Forward) -> None:
        """Ties the hashes behind the records just written to those of their counterparts."""
        tokens, chains = self._engine.tokens, self._engine.chains
        for part in forward.parts:
            for name, group in self._engine.groups.items():
                pool = group.pool
                for slot in part.slots[name]:
                    found = pool.found.get(slot)
                    if found is None or (found.writer_uid, found.writer_step) != (
                        part.uid,
                        forward.step,
                    ):
                        continue
                    token, position, prev, _ = pool.records[pool.numbering.dense(slot)].tolist()
                    if (token, position) == (tokens.here(found.token), found.position):
                        behind = to_signed(splitmix64_mix3(prev, token, position))
                        chains.rebind(found.next_hash, behind)

    def _store_bytes(self, step: ForwardStep) -> None:
        for group, slots in zip(self._engine.groups.values(), step.out_cache_loc, strict=True):
            real = (slots > PADDING_SLOT) & (slots < group.pool.numbering.size)
            group.pool.store_bytes(slots[real], step.input_ids[real], step.positions[real])

    def _scrub_root(self) -> None:
        root, group = self._case.root, self._engine.root_group
        launch_canary_scrub_kernel(
            context=group.guard.scrub_second_look,
            slots=torch.tensor([group.pool.numbering.dense(root.slot)]),
            num_valid=torch.ones(1, dtype=torch.int32),
            step=root.step,
        )

    def _violations(self) -> list[Violation]:
        names = list(self._engine.groups)
        violations = [
            Violation.from_row(row, names, RequestNames()) for row in self._ring.read().rows
        ]
        return [self._with_original_slot(violation) for violation in violations]

    def _with_original_slot(self, violation: Violation) -> Violation:
        numbering = self._engine.groups[violation.group].pool.numbering
        return replace(violation, slot=numbering.original(violation.slot))
