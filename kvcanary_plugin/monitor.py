"""The steps around one forward, in order.

:class:`CanaryMonitor` runs a fixed list of launches per group on the current stream: before the
engine's forward it verifies what the forward is about to read and records what it is about to
write, after it, it seals. Nothing in here synchronises with the device, and a violation is never
looked at here: it lies in the ring until the drain reads it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch

from kvcanary_plugin.cache import KVCacheGroup
from kvcanary_plugin.carried import (
    CarriedRecords,
    ExternalSlots,
    LoadInFlight,
    adopt,
    adopt_sequences,
    bytes_arrived,
    export_records,
    import_in_flight,
    import_records,
    take_folds_along,
    verify_bytes,
)
from kvcanary_plugin.config import CanaryConfig
from kvcanary_plugin.forward import (
    DUMMY_UID,
    ForwardKind,
    ForwardResult,
    ForwardStep,
    HostTokens,
)
from kvcanary_plugin.gate import EngineGate
from kvcanary_plugin.guard import GroupGuard, SlotRecords, ViolationSink
from kvcanary_plugin.identity import PrefixHasher
from kvcanary_plugin.kernels import (
    LaunchTag,
    RealKvHashMode,
    SlotEvent,
    TableReads,
    WritePlan,
    launch_canary_prepare_kernel,
    launch_canary_seal_kernel,
    launch_canary_table_verify_kernel,
    launch_canary_write_kernel,
)
from kvcanary_plugin.kernels.consts import UNKNOWN, EventKind
from kvcanary_plugin.metrics import ErrorPlace
from kvcanary_plugin.oracle import TokenHistory
from kvcanary_plugin.recorder import FlightRecorder
from kvcanary_plugin.reverify import Reverifier
from kvcanary_plugin.scrub import Scrubber
from kvcanary_plugin.step_copy import StepCopy, copy_of
from kvcanary_plugin.stores import StoreWatch
from kvcanary_plugin.violations import KVCanaryViolationError

logger = logging.getLogger(__name__)

Pair = tuple[torch.Tensor, torch.Tensor]
HostKnowledge = tuple[Pair | None, Pair | None]

# From so many tokens of one request on, the write runs beside the forward.
_LONG_EXTEND = 256


class CanaryMonitor:
    """Runs the canary's steps around each forward of one engine rank.

    Not thread-safe: :meth:`before_forward` and :meth:`after_forward` are called in turn by the
    thread that launches the engine's forwards, with the forward's stream current. :meth:`on_idle`
    is called by one other thread now and then. Counters and state may be read from any thread.
    """

    def __init__(
        self,
        *,
        config: CanaryConfig,
        groups: Sequence[KVCacheGroup],
        max_requests: int,
        raise_pending: Callable[[], None],
        on_error: Callable[[ErrorPlace, BaseException], None],
    ) -> None:
        """
        Args:
            config: the settings to start with; :meth:`reconfigure` replaces them.
            groups: what is guarded, all on one device; ``ForwardStep.out_cache_loc`` follows this
                order.
            max_requests: requests that a forward may hold.
            raise_pending: called before each forward; raises in mode raise when violations lie in
                the ring.
            on_error: called with (where, exception) when the canary itself fails.
        """
        if not groups:
            raise ValueError("kvcanary: no KV cache group to guard; at least one is needed")
        device = groups[0].device
        self._config = config
        self._raise_pending = raise_pending
        self._on_error = on_error
        self.sink = ViolationSink.allocate(capacity=config.ring.capacity, device=device)
        self.guards = tuple(
            GroupGuard(
                group=group,
                index=index,
                sink=self.sink,
                slot_records=slot_records,
                max_requests=max_requests,
                verify_mode=RealKvHashMode[config.verify.real_kv.upper()],
                seal_mode=RealKvHashMode[config.seal.real_kv.upper()],
            )
            for index, (group, slot_records) in enumerate(
                zip(groups, _slot_records(groups), strict=True)
            )
        )
        self.history = self._make_history(groups[0]) if self._needs_history(config) else None
        self.recorder = FlightRecorder(config.recorder.forwards)
        self._gate = EngineGate(device)
        self.scrubber = Scrubber(
            guards=self.guards,
            settings=config.scrub,
            gate=self._gate,
            apply_events=self._apply_events_on_idle,
        )
        self.reverifier = Reverifier(guards=self.guards, max_requests=max_requests)
        self.stores = StoreWatch(self.guards)
        self.external_slots = tuple(ExternalSlots(guard) for guard in self.guards)
        self._no_requests = torch.zeros(0, dtype=torch.int64, device=device)
        self._no_plan = WritePlan.allocate(write_req_capacity=1, device=device)
        self._last_step = -1
        self.blind_because: str | None = None
        self.forward_counts: Counter[tuple[ForwardKind, ForwardResult]] = Counter()
        self._prefix_hasher = PrefixHasher()
        self._step: ForwardStep | None = None
        self._copy: StepCopy | None = None  # of this forward's arrays; held until it is over
        self._tree: ForwardStep | None = None  # the last forward, if its drafts are a tree
        self._result = ForwardResult.UNCHECKED

    def before_forward(self, step: ForwardStep) -> None:
        """Steps 1 to 3, before the engine's forward is launched."""
        self.forward_begins()
        self.look_at(step)

    def forward_begins(self, *, arrays_stay: bool = False) -> bool:
        """What comes first. Returns whether :meth:`look_at` may wait until the forward is launched.

        Then :meth:`forward_follows` comes before the forward, and :meth:`look_at` inside
        :meth:`forward_is_launched`.

        Args:
            arrays_stay: whether the engine leaves the arrays of the step as they are until the
                forward's stream has come to its end.
        """
        self._raise_pending()
        self._gate.engine_enters()
        self._step = None
        self._result = ForwardResult.UNCHECKED
        may_wait = False
        if self.blind_because is None:
            with self.guard_errors("launch"):
                self.scrubber.step_begins()
                self.reverifier.sample(self._reverified_share)
                may_wait = arrays_stay and self._reads_nothing_that_a_forward_changes
        return may_wait

    def forward_follows(self, *, longest_extend: int) -> None:
        """The stream holds what :meth:`look_at` will read. The forward is launched next.

        Args:
            longest_extend: most new tokens that a request of the step may have.
        """
        # With the few short kernels of a batch without long prompts a second stream costs a step
        # as much as it saves.
        if longest_extend >= _LONG_EXTEND:
            self._gate.mark_before_forward()

    def forward_is_launched(self) -> AbstractContextManager[None]:
        """Around :meth:`look_at` where it has waited for the forward."""
        return self._gate.forward_is_launched()

    def look_at(self, step: ForwardStep) -> None:
        """Steps 1 to 3: events, verify, write. After :meth:`forward_begins`."""
        if step.kind is ForwardKind.DUMMY:
            step = _with_dummy_uids(step)
        self._step = step
        self._tree = step if step.drafts_a_tree else None
        if self.blind_because is not None:
            return
        with self.guard_errors("launch"):
            self._result = ForwardResult.CHECKED
            if self._last_step == -1:
                for guard in self.guards:
                    guard.pack_contexts()
            events = [self._take_events(guard) for guard in self.guards]
            self._copy = self._record(step)
            self._learn_prompts(step)
            known = {
                offset: self._host_knowledge(step, offset)
                for offset in {guard.group.token_offset for guard in self.guards}
            }
            for guard, out_cache_loc, happened in zip(
                self.guards, step.out_cache_loc, events, strict=True
            ):
                _, prefix_hashes = known[guard.group.token_offset]
                reads = self._reads(guard, step, prefix_hashes)
                self._apply_lifecycle_events(guard, reads, out_cache_loc, happened, step)
                self._verify(guard, reads, step)
                self.reverifier.keep(guard, reads)
                if self.reverifier.is_sampled:
                    self.stores.keep(guard, out_cache_loc)
            self._write_all(step, {offset: inputs for offset, (inputs, _) in known.items()})

    def after_forward(self) -> None:
        """Steps 5 to 7: everything that has to happen once the engine's forward is launched."""
        step, self._step = self._step, None
        if step is not None and self.blind_because is None:
            with self.guard_errors("launch"):
                self._gate.join_branch()
                for guard, out_cache_loc in zip(self.guards, step.out_cache_loc, strict=True):
                    self._seal(guard, out_cache_loc, step)
                    self.stores.look(guard)
                    self._reverify(guard, step)
                self._scrub(step)
                self._last_step = step.step
        self._gate.engine_leaves()
        self._count(step, self._result)

    def forward_failed(self) -> None:
        """Comes instead of :meth:`after_forward`: nobody knows what the forward has stored.

        Launches nothing, since the device may be gone.
        """
        step, self._step = self._step, None
        self._count(step, ForwardResult.UNCHECKED)

    def keep_drafts(self, path: torch.Tensor) -> None:
        """The engine has chosen among the trees of drafts that the last forward wrote.

        It has moved the K/V of the chosen nodes to the front of each request's slots, in the same
        :meth:`engine_works`. They get records that continue the request's chain; what was not
        chosen is written again before anybody reads it.

        Args:
            path: int32 | int64 [bs, depth], indices into the flat tokens of that forward, from the
                root on; -1 behind the end of each path.
        """
        step, self._tree = self._tree, None
        if step is None or self.blind_because is not None:
            return
        with self.guard_errors("launch"):
            requests, depth = path.shape
            nodes = path.reshape(-1).to(torch.int64)
            chosen = nodes >= 0
            nodes = nodes.clamp(min=0)
            rows = self.guards[0].write_plan.write_offsets.shape[0]
            offsets = torch.arange(rows, device=path.device) * depth
            for guard, out_cache_loc in zip(self.guards, step.out_cache_loc, strict=True):
                # The folds of before the move tell whether it went right; like every second look,
                # it is taken now and then. Else what has been moved is folded as it is.
                before = (
                    export_records(guard, out_cache_loc[nodes])
                    if self.reverifier.is_sampled
                    else None
                )
                front = out_cache_loc.view(requests, -1)[:, :depth].reshape(-1)
                slots = torch.where(chosen, front, torch.full_like(front, UNKNOWN))
                plan = replace(guard.write_plan, write_offsets=offsets)
                launch_canary_write_kernel(
                    context=guard.context(LaunchTag.WRITE),
                    plan=plan,
                    input_ids=step.input_ids[nodes],
                    positions=step.positions[nodes],
                    out_cache_loc=slots,
                    enable_write_input_assert=False,
                    expected_input_tokens=None,
                    expected_input_positions=None,
                    step=step.step,
                )
                if before is not None:
                    take_folds_along(guard, slots, before)
                else:
                    launch_canary_seal_kernel(
                        context=guard.context(LaunchTag.SEAL),
                        plan=plan,
                        out_cache_loc=slots,
                        step=step.step,
                    )

    def on_idle(self) -> None:
        """Called now and then by a thread of its own: an idle engine scrubs too."""
        if self.blind_because is None and self._config.mode != "off":
            self.scrubber.on_idle()

    def record_sampled(
        self, request_rows: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        """Tell the oracle what the sampler chose: ``tokens[r]`` at ``positions[r]``, all [bs]."""
        if self.history is None or self.blind_because is not None:
            return
        # The row of a request that is done may get its next tenant on another stream.
        with self.guard_errors("oracle"), self._gate.engine_works():
            self.history.record_sampled(request_rows, positions, tokens)

    def engine_works(self) -> AbstractContextManager[None]:
        """Around what the engine does to K/V outside of a forward, records included.

        Nothing looks at bytes that have changed before their records have followed.
        """
        return self._gate.engine_works()

    def page_tables(self) -> AbstractContextManager[bool]:
        """For any thread: yields whether the engine's tables may be read; inside, they stay."""
        return self._gate.tables()

    def copy_slots(self, index: int, source: torch.Tensor, destination: torch.Tensor) -> None:
        """The engine has copied K/V (int64 [n] slots each): the records go with it.

        Like the two below once per pool, by the index of one of its groups, before the forward
        that reads what was changed.
        """
        if self.blind_because is None:
            with self.guard_errors("lifecycle"), self._gate.engine_works():
                self._apply_queued_events()
                self.guards[index].slot_records.copy(source, destination)
                self.recorder.record_event(
                    EventKind.MOVE,
                    group=index,
                    slots=destination.clone(),
                    sources=source.clone(),
                )

    def forget_slots(self, index: int, slots: torch.Tensor) -> None:
        """The engine has cleared the K/V of ``slots`` (int64 [n]): nobody has written them."""
        if self.blind_because is None:
            with self.guard_errors("lifecycle"), self._gate.engine_works():
                self._apply_queued_events()
                self.guards[index].slot_records.forget(slots)
                self.recorder.record_event(EventKind.RESET, group=index, slots=slots.clone())

    def forget_everything(self) -> None:
        """The engine has dropped all K/V (after its warm-up, or when it wakes up).

        Also before it gives the memory away: bytes that nobody has written are not read, and page
        tables not before the next forward.
        """
        self._gate.tables_go()
        if self.blind_because is None:
            with self.guard_errors("lifecycle"), self._gate.engine_works():
                self._apply_queued_events()
                for guard in self.guards:
                    guard.slot_records.forget(slice(None))
                    self.recorder.record_event(EventKind.RESET, group=guard.index, slots=None)

    def export_slots(self, index: int, slots: torch.Tensor) -> CarriedRecords | None:
        """What to take along when the bytes of ``slots`` (int64 [n]) go to another place.

        None when the canary is blind: then there is nothing to vouch for.
        """
        if self.blind_because is None:
            with self.guard_errors("lifecycle"):
                return export_records(self.guards[index], slots)
        return None

    def import_slots(
        self, index: int, slots: torch.Tensor, carried: CarriedRecords, *, verify: bool = True
    ) -> None:
        """The bytes of ``slots`` have come back with their records (``import_records``).

        Like the two below before the forward that reads them, outside of any forward.
        """
        if self.blind_because is None:
            with self.guard_errors("lifecycle"), self._gate.engine_works():
                self._apply_queued_events()
                import_records(
                    self.guards[index], slots, carried, step=self._last_step, verify=verify
                )

    def verify_imported(self, index: int, slots: torch.Tensor, carried: CarriedRecords) -> None:
        """The bytes of slots that were imported without ``verify`` are there now."""
        if self.blind_because is None:
            with self.guard_errors("lifecycle"), self._gate.engine_works():
                self._apply_queued_events()
                verify_bytes(self.guards[index], slots, carried, step=self._last_step)

    def import_in_flight(
        self, index: int, slots: torch.Tensor, carried: CarriedRecords
    ) -> LoadInFlight | None:
        """Records are back, the bytes of ``slots`` arrive later; None when the canary is blind."""
        if self.blind_because is None:
            with self.guard_errors("lifecycle"), self._gate.engine_works():
                self._apply_queued_events()
                return import_in_flight(self.guards[index], slots, carried, step=self._last_step)
        return None

    def bytes_arrived(self, index: int, load: LoadInFlight) -> None:
        """The bytes of ``load`` are there now, on the current stream."""
        if self.blind_because is None:
            with self.guard_errors("lifecycle"), self._gate.engine_works():
                self._apply_queued_events()
                bytes_arrived(self.guards[index], load, step=self._last_step)

    def adopt_slots(
        self,
        index: int,
        slots: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        *,
        previous_slot: int = -1,
        request_uid: int = -1,
        identity_key: int = 0,
        bytes_are_there: bool = True,
    ) -> None:
        """Somebody else has filled ``slots``; no records came along (``adopt``)."""
        if self.blind_because is None:
            with self.guard_errors("lifecycle"), self._gate.engine_works():
                self._apply_queued_events()
                adopt(
                    self.guards[index],
                    slots,
                    tokens,
                    positions,
                    previous_slot=previous_slot,
                    request_uid=request_uid,
                    identity_key=identity_key,
                    step=self._last_step,
                    bytes_are_there=bytes_are_there,
                )

    def adopt_sequences(
        self,
        index: int,
        plan: WritePlan,
        slots: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """The same for the slots of several sequences, which ``plan`` tells apart.

        Call :meth:`learn_prompts` as well, for requests that no forward brings any prompt of.
        """
        if self.blind_because is None:
            with self.guard_errors("lifecycle"), self._gate.engine_works():
                self._apply_queued_events()
                adopt_sequences(
                    self.guards[index], plan, slots, tokens, positions, step=self._last_step
                )

    def learn_prompts(self, requests: Iterable[HostTokens]) -> None:
        """Tell the oracle the tokens of requests whose prompt no forward computes."""
        if self.history is not None and self.blind_because is None:
            # The forward before may still compare with what the rows' last tenants had.
            with self.guard_errors("oracle"), self._gate.engine_works():
                self.history.record_prompt(requests)

    def reconfigure(self, config: CanaryConfig) -> None:
        """Take over settings that may change while serving; what fails changes nothing."""
        if self.history is None and self._needs_history(config):
            # Tokens of requests already running are not known; the table fills as they arrive.
            # First, since the device may have no room for it.
            self.history = self._make_history(self.guards[0].group)
        if config.scrub != self._config.scrub:
            self.scrubber.reconfigure(config.scrub)
        self._config = config

    @property
    def config(self) -> CanaryConfig:
        """The settings in force."""
        return self._config

    # --- the steps ------------------------------------------------------------------------------

    @property
    def _reads_nothing_that_a_forward_changes(self) -> bool:
        """Whether the coming :meth:`look_at` does, and has nothing to compare with afterwards."""
        return (
            not self.reverifier.is_sampled
            and self.history is None
            and all(guard.may_verify_later for guard in self.guards)
        )

    def _count(self, step: ForwardStep | None, result: ForwardResult) -> None:
        kind = step.kind if step is not None else ForwardKind.UNKNOWN
        self.forward_counts[kind, result] += 1

    def _record(self, step: ForwardStep) -> StepCopy | None:
        """Keep the step for reports; what fails here costs reports and no check."""
        try:
            return self.recorder.record(step)
        except Exception as error:
            self.recorder.stop()
            self._on_error("recorder", error)
            return None

    def _apply_lifecycle_events(
        self,
        guard: GroupGuard,
        reads: TableReads,
        out_cache_loc: torch.Tensor,
        events: Sequence[SlotEvent],
        step: ForwardStep,
    ) -> None:
        launch_canary_prepare_kernel(
            context=guard.context(LaunchTag.LIFECYCLE),
            reads=reads,
            write_plan_out=guard.write_plan,
            out_cache_loc=out_cache_loc,
            step=step.step,
            events=events,
        )

    def _verify(self, guard: GroupGuard, reads: TableReads, step: ForwardStep) -> None:
        if self._config.mode == "off":
            self._result = ForwardResult.UNCHECKED
            return
        launch_canary_table_verify_kernel(
            context=guard.context(LaunchTag.VERIFY), reads=reads, step=step.step
        )

    def _write_all(self, step: ForwardStep, expected: Mapping[int, Pair | None]) -> None:
        """The records of this step; ``expected`` inputs by the token offset of the groups."""
        is_long = (
            step.longest_extend >= _LONG_EXTEND
            and not self._config.write_input_assert
            and not self._gate.is_beside_forward
        )
        if is_long and self._copy is None:
            self._copy = self._copy_if_there_is_room(step)
        if not is_long or self._copy is None:
            for guard, out_cache_loc in zip(self.guards, step.out_cache_loc, strict=True):
                self._write(guard, out_cache_loc, expected[guard.group.token_offset], step)
            return
        # A request's chain is serial, a tenth of a microsecond a token: the forward need not wait.
        input_ids, positions, slots = self._copy.by_token()
        copy = replace(step, input_ids=input_ids, positions=positions, out_cache_loc=slots)
        self._gate.branch_begins()
        for guard, out_cache_loc in zip(self.guards, slots, strict=True):
            self._write(guard, out_cache_loc, None, copy, beside=True)

    @staticmethod
    def _copy_if_there_is_room(step: ForwardStep) -> StepCopy | None:
        """None where the engine has left no memory: the write then comes before the forward."""
        try:
            return copy_of(step)
        except torch.OutOfMemoryError:
            return None

    def _write(
        self,
        guard: GroupGuard,
        out_cache_loc: torch.Tensor,
        expected: Pair | None,
        step: ForwardStep,
        *,
        beside: bool = False,
    ) -> None:
        tokens, positions = expected if expected is not None else (None, None)
        is_chain = not step.drafts_a_tree
        launch_canary_write_kernel(
            context=guard.context(LaunchTag.WRITE) if is_chain else guard.tree_write,
            plan=guard.write_plan,
            input_ids=step.input_ids,
            positions=step.positions,
            out_cache_loc=out_cache_loc,
            enable_write_input_assert=expected is not None,
            expected_input_tokens=tokens,
            expected_input_positions=positions,
            step=step.step,
            beside=beside,
        )

    def _seal(self, guard: GroupGuard, out_cache_loc: torch.Tensor, step: ForwardStep) -> None:
        launch_canary_seal_kernel(
            context=guard.context(LaunchTag.SEAL),
            plan=guard.write_plan,
            out_cache_loc=out_cache_loc,
            step=step.step,
        )

    def _reverify(self, guard: GroupGuard, step: ForwardStep) -> None:
        checks = self._config.checks.table_changed and guard.group.table_stable_through_forward
        self.reverifier.look_again(guard, step, compare_tables=checks)

    def _scrub(self, step: ForwardStep) -> None:
        if self._config.mode != "off":
            self.scrubber.after_forward(step.step)
        for external in self.external_slots:
            external.refresh()

    # --- what the steps need --------------------------------------------------------------------

    def _apply_queued_events(self, *, on_idle: bool = False) -> None:
        """Outside of a forward, before something that comes after the events queued so far."""
        for guard in self.guards:
            events = self._take_events(guard)
            if events:
                if on_idle:
                    guard.events.wait_for_tensors()
                launch_canary_prepare_kernel(
                    context=guard.context(LaunchTag.LIFECYCLE),
                    reads=self._no_reads(guard.group),
                    write_plan_out=self._no_plan,
                    out_cache_loc=self._no_requests,
                    step=self._last_step,
                    events=events,
                )

    def _apply_events_on_idle(self) -> None:
        """The same for an idle turn, which an error ends: events that are lost may not stay so."""
        try:
            self._apply_queued_events(on_idle=True)
        except Exception as error:
            self._go_blind("lifecycle", error)
            raise

    def _no_reads(self, group: KVCacheGroup) -> TableReads:
        """The reads of a batch without requests."""
        return TableReads(
            page_table=group.page_table,
            page_size=group.page_size,
            padding_row=group.padding_row,
            request_rows=self._no_requests,
            request_uids=self._no_requests,
            prefix_lens=self._no_requests,
            extend_lens=self._no_requests,
            max_prefix_len=0,
        )

    @property
    def _reverified_share(self) -> float:
        return 0.0 if self._config.mode == "off" else self._config.reverify.sample

    def _take_events(self, guard: GroupGuard) -> Sequence[SlotEvent]:
        """What the allocator did since the last forward; the recorder keeps it as well."""
        events = guard.events.take()
        for event in events:
            moved = event.destinations is not None
            self.recorder.record_event(
                event.kind,
                group=guard.index,
                slots=event.destinations if moved else event.slots,
                sources=event.slots if moved else None,
                page_size=event.page_size,
            )
        return events

    def _reads(
        self,
        guard: GroupGuard,
        step: ForwardStep,
        prefix_hashes: Pair | None,
    ) -> TableReads:
        group = guard.group
        check_tokens = self._knows_tokens(step) and self._config.checks.token
        hashes, valid = prefix_hashes if prefix_hashes is not None else (None, None)
        known_lens = step.prefix_lens
        if check_tokens and group.token_offset:
            # The last slot of the prefix holds a token that this forward computes.
            known_lens = known_lens + group.token_offset
        return TableReads(
            page_table=group.page_table,
            page_size=group.page_size,
            padding_row=group.padding_row,
            request_rows=step.request_rows,
            request_uids=step.request_uids,
            prefix_lens=step.prefix_lens,
            extend_lens=step.extend_lens,
            max_prefix_len=step.max_prefix_len,
            full_to_swa_index_mapping=group.full_to_swa,
            swa_window_size=group.swa_window_size,
            identity_keys=step.identity_keys,
            expected_tokens=self.history.tokens if check_tokens and self.history else None,
            expected_valid_lens=known_lens if check_tokens else None,
            token_offset=group.token_offset,
            prefix_hashes=hashes,
            prefix_hash_valid=valid,
        )

    def _host_knowledge(self, step: ForwardStep, token_offset: int) -> HostKnowledge:
        """What the host knows of the inputs and prefixes of the groups with that offset."""
        return self._expected_inputs(step, token_offset), self._prefix_hashes(step, token_offset)

    def _prefix_hashes(self, step: ForwardStep, token_offset: int) -> Pair | None:
        """Host chain hash of every prefix that this forward admits, spread over the batch rows."""
        if not self._config.checks.prefix_identity:
            return None
        admitted = [
            request
            for request in step.host_tokens
            if request.prefix_len > 0 and request.num_tokens >= request.prefix_len + token_offset
        ]
        if not admitted:
            return None
        size, device = step.batch_size, step.request_rows.device
        # Hashes (int64) and flags (int32) in one buffer, so that one copy brings both over.
        staging = torch.zeros(
            size + (size + 1) // 2, dtype=torch.int64, pin_memory=device.type == "cuda"
        )
        hashes, valid = staging[:size], staging[size:].view(torch.int32)
        for request in admitted:
            hashes[request.batch_row] = self._prefix_hasher.prefix_hash(
                request_uid=request.request_uid,
                tokens=request.tokens,
                prefix_len=request.prefix_len,
                key=request.identity_key,
                token_offset=token_offset,
            )
            valid[request.batch_row] = 1
        on_device = staging.to(device, non_blocking=True)
        return on_device[:size], on_device[size:].view(torch.int32)[:size]

    def _learn_prompts(self, step: ForwardStep) -> None:
        if self.history is None:
            return
        if step.moved_rows is not None:
            self.history.move_rows(*step.moved_rows)
        self.history.record_prompt(step.host_tokens)

    def _expected_inputs(self, step: ForwardStep, token_offset: int) -> Pair | None:
        if self.history is None or not self._config.write_input_assert:
            return None
        expected = (
            self.history.expected_inputs(step, token_offset=token_offset)
            if self._knows_tokens(step)
            else None
        )
        if expected is None:
            self._result = ForwardResult.PARTIAL
        return expected

    def _knows_tokens(self, step: ForwardStep) -> bool:
        return self.history is not None and not step.rows_trade_places

    @staticmethod
    def _needs_history(config: CanaryConfig) -> bool:
        return config.checks.token or config.write_input_assert

    @staticmethod
    def _make_history(group: KVCacheGroup) -> TokenHistory:
        rows, width = group.page_table.shape
        history = TokenHistory(rows=rows, width=width * group.page_size, device=group.device)
        if group.device.type == "cuda":
            # Filled on this thread's stream, used on the engine's.
            torch.cuda.current_stream(group.device).synchronize()
        return history

    @contextmanager
    def guard_errors(self, where: ErrorPlace) -> Iterator[None]:
        """Keeps an error of the canary away from the engine, except in mode raise.

        The canary stops for good: records that miss a forward would alarm on slots that are fine.
        A violation that mode raise throws passes through in every case.
        """
        try:
            yield
        except KVCanaryViolationError:
            raise
        except Exception as error:
            self._result = ForwardResult.ERROR
            self._go_blind(where, error)
            if self._config.mode == "raise":
                raise

    def _go_blind(self, where: ErrorPlace, error: BaseException) -> None:
        if self.blind_because is None:
            self.blind_because = f"{where}: {type(error).__name__}: {error}"
            for guard in self.guards:
                guard.events.stop()
            self._on_error(where, error)


def _with_dummy_uids(step: ForwardStep) -> ForwardStep:
    """The kernels ask no owner about rows without a uid; a dummy batch has to be asked."""
    uids = step.request_uids
    named = torch.where(uids == UNKNOWN, torch.full_like(uids, DUMMY_UID), uids)
    return replace(step, request_uids=named)


def _slot_records(groups: Sequence[KVCacheGroup]) -> list[SlotRecords]:
    """Records for each group, the same object for groups of one pool."""
    of_pool: dict[str, SlotRecords] = {}
    result = []
    for group in groups:
        shared = of_pool.get(group.pool) if group.pool is not None else None
        records = shared if shared is not None else SlotRecords.allocate(group)
        if records.records.shape[0] != group.num_slots:
            raise ValueError(
                f"kvcanary: group {group.name!r}: num_slots must be that of the other groups of "
                f"pool {group.pool!r}, {records.records.shape[0]}; got {group.num_slots}"
            )
        if group.pool is not None:
            of_pool[group.pool] = records
        result.append(records)
    return result
