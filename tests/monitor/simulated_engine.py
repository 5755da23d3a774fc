"""A paged engine in plain Python under the monitor, with its own truth of what every slot holds.

It has what real engines have: an allocator with pages, a prefix tree with eviction, folds and
tombstones, a sliding-window pool behind a lookup table, chunked prefill in mixed batches, prefix
hits inside one step, preemption and recompute, speculation with rejected tokens, a host tier, moved
slots, flushes, dummy batches, identity keys, and requests that end one step late. One seed is one
run.

The truth does not come from the canary: each token has a content number, made from the request's
own tokens and key; each slot of each group remembers which content was stored there last; and a
forward that reads a slot with another content than its request should have there is a harmful read.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from kvcanary_plugin.cache import KVCacheGroup, row_source
from kvcanary_plugin.carried import CarriedRecords
from kvcanary_plugin.config import CanaryConfig
from kvcanary_plugin.forward import ForwardKind, ForwardStep, HostTokens
from kvcanary_plugin.identity import identity_key
from kvcanary_plugin.kernels import translate_out_cache_loc
from kvcanary_plugin.monitor import CanaryMonitor
from kvcanary_plugin.ring import RingReader
from kvcanary_plugin.violations import RequestNames, Violation
from tests.monitor.world import checking_everything

Int64s = npt.NDArray[np.int64]

PADDING_ROW = 0
NOTHING_STORED = -1
DAMAGED = -2
_WORDS = 2  # 8-byte words of a slot in each of the two strips (K and V)
_MASK = (1 << 64) - 1
_VOCABULARY = 40
_ROWS = 12
_MOST_TOKENS = 120


@dataclass(frozen=True, kw_only=True)
class Options:
    """What kind of engine is simulated.

    Fields:
        slots: slots of the full pool, small enough for eviction and preemption to be common.
        page_size: slots of a page of the allocator and of the prefix tree.
        block_table: the page table holds pages (vLLM); else slots (SGLang). Such an engine delivers
            no allocator events.
        swa_slots: slots of the sliding-window pool; 0 for none.
        window: earlier tokens that a sliding-window layer sees.
        speculation: tokens that a draft adds to a decode step, at most.
        caches_at_schedule: pages enter the prefix tree before the forward that fills them, so that
            others hit them in the same forward.
        host_tier: "" for none; "carried": pages come back with their records; "adopted": without.
    """

    slots: int = 320
    page_size: int = 1
    block_table: bool = False
    swa_slots: int = 0
    window: int = 0
    speculation: int = 0
    caches_at_schedule: bool = False
    host_tier: str = ""

    @property
    def tracks_allocation(self) -> bool:
        return not self.block_table


ENGINES: dict[str, Options] = {
    "token slots": Options(),
    "pages": Options(page_size=4),
    "sliding window": Options(swa_slots=200, window=9),
    "speculation": Options(speculation=4),
    "speculation in pages": Options(speculation=3, page_size=4),
    "block table": Options(block_table=True, page_size=4, caches_at_schedule=True),
    "hits in the same step": Options(caches_at_schedule=True, page_size=2),
    "host tier, records carried": Options(host_tier="carried", page_size=2),
    "host tier, adopted": Options(host_tier="adopted"),
}


def mixed(*parts: int) -> int:
    """One number (below 2^62) from several; has nothing to do with the canary's hashes."""
    value = 0x243F6A8885A308D3
    for part in parts:
        value = ((value ^ part) * 0xD1342543DE82EF95 + 0x2545F4914F6CDD1D) & _MASK
        value ^= value >> 31
    return value >> 2


@dataclass(eq=False)
class Node:
    """A page of the prefix tree."""

    parent: Node | None
    tokens: tuple[int, ...] = ()
    slots: list[int] = field(default_factory=list)
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    users: int = 0
    used_at: int = 0


@dataclass(eq=False)
class Request:
    """A request, waiting or running.

    ``slots[p]`` holds position p; the first ``len(nodes)`` pages of them belong to the tree.
    ``reserved`` are slots behind them that a rejected speculation left over.
    """

    uid: int
    key: int
    tokens: list[int]
    outputs_left: int
    content: list[int] = field(default_factory=list)
    row: int = -1
    computed: int = 0
    slots: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    ends_late: bool = False
    scheduled_in: int = -1
    preempted_in: int = -1

    def extend_content(self) -> None:
        """Content number of every token: all tokens up to it and the key."""
        for token in self.tokens[len(self.content) :]:
            before = self.content[-1] if self.content else self.key & _MASK
            self.content.append(mixed(before, token, len(self.content)))


@dataclass(eq=False)
class Part:
    """A request's share of one forward."""

    request: Request | None
    row: int
    prefix: int
    inputs: list[int]
    positions: list[int]
    slots: list[int]
    content: list[int]
    drafts: list[int] = field(default_factory=list)
    is_prompt: bool = False


@dataclass(eq=False)
class HostPage:
    """A page on the host: its bytes, what they are, and its records if they travel."""

    kv: npt.NDArray[np.int64]
    held: Int64s
    carried: CarriedRecords | None


class Pool:
    """The slots of one group: bytes, truth, free pages."""

    def __init__(self, *, slots: int, page_size: int, rng: random.Random) -> None:
        self.page_size = page_size
        self.num_slots = slots
        self.kv = np.zeros((2, slots, _WORDS), dtype=np.int64)
        self.held = np.full(slots, NOTHING_STORED, dtype=np.int64)
        self.free_pages: list[int] = []
        self._rng = rng
        self.clear()

    def clear(self) -> None:
        self.free_pages = list(range(1, self.num_slots // self.page_size))
        self._rng.shuffle(self.free_pages)

    def store(self, slots: Sequence[int], content: Sequence[int]) -> None:
        """What the model's forward does: K/V of ``content`` into ``slots`` (0 is nobody's)."""
        index = np.asarray(slots, dtype=np.int64)
        numbers = np.asarray(content, dtype=np.int64)
        for strip in range(2):
            for word in range(_WORDS):
                self.kv[strip, index, word] = numbers * (2 * word + 3) + strip
        self.held[index] = numbers

    def sources(self) -> tuple[torch.Tensor, ...]:
        return tuple(torch.from_numpy(self.kv[strip]) for strip in range(2))


class SimulatedEngine:
    """See the module. ``faults`` asks at every place where an engine can go wrong."""

    def __init__(
        self,
        options: Options,
        *,
        seed: int,
        config: CanaryConfig | None = None,
        fault: Callable[[str], bool] = lambda _kind: False,
        arrays_stay: bool = False,
    ) -> None:
        self.options = options
        self.arrays_stay = arrays_stay
        self.rng = random.Random(seed)
        self.fires = fault
        page = options.page_size
        self.full = Pool(slots=options.slots, page_size=page, rng=self.rng)
        per_entry = page if options.block_table else 1
        self.entry_size = per_entry
        self.table = torch.zeros((_ROWS, -(-2 * _MOST_TOKENS // per_entry)), dtype=torch.int32)
        groups = [self._group("full", self.full, per_entry)]
        self.swa: Pool | None = None
        self.lookup = torch.zeros(options.slots, dtype=torch.int64)
        if options.swa_slots:
            self.swa = Pool(slots=options.swa_slots, page_size=1, rng=self.rng)
            groups.append(self._group("swa", self.swa, 1, self.lookup))
        self.errors: list[BaseException] = []
        self.monitor = CanaryMonitor(
            config=config or checking_everything(reverify={"sample": 1.0}),
            groups=groups,
            max_requests=2 * _ROWS,
            raise_pending=lambda: None,
            on_error=lambda _where, error: self.errors.append(error),
        )
        self._reader = RingReader(self.monitor.sink.ring)
        self.step = 0
        self.turns = 0
        self.events: Counter[str] = Counter()
        self.violations: list[Violation] = []
        self.harmful_reads: list[tuple[int, str, int, int]] = []
        self.roots: dict[int, Node] = {}
        self.host: dict[tuple[int, tuple[int, ...]], HostPage] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.free_rows = list(range(1, _ROWS))
        self._moved_rows: tuple[list[int], list[int]] = ([], [])
        self._next_uid = 1
        self._weights = 1
        self._system_prompts = [self._random_tokens(3, 40) for _ in range(4)]

    def _group(
        self, name: str, pool: Pool, entry_size: int, lookup: torch.Tensor | None = None
    ) -> KVCacheGroup:
        return KVCacheGroup(
            name=name,
            num_slots=pool.num_slots,
            page_table=self.table,
            page_size=entry_size,
            padding_row=PADDING_ROW,
            sources=tuple(row_source(strip) for strip in pool.sources()),
            full_to_swa=lookup,
            swa_window_size=self.options.window if lookup is not None else 0,
            tracks_allocation=self.options.tracks_allocation,
            table_stable_through_forward=True,
        )

    # --- a turn of the scheduler ------------------------------------------------------------------

    def turn(self) -> list[Violation]:
        """Things that happen between forwards, then one forward; what the canary found in it."""
        rng = self.rng
        self.turns += 1
        if len(self.waiting) < 4 and rng.random() < 0.45:
            self._arrive()
        chance = rng.random()
        if chance < 0.04:
            self._move_a_page()
        elif chance < 0.06 and self.running:
            self._abort(rng.choice(self.running))
        elif chance < 0.09 and self.running:
            self._preempt(rng.choice(self.running))
        elif chance < 0.12:
            self._evict(rng.randint(1, 12))
        elif chance < 0.14:
            self._evict_window_of_tree()
        elif chance < 0.16:
            self._move_a_row()
        elif chance < 0.165:
            self._flush(sleeps=rng.random() < 0.3)
        elif chance < 0.17:
            self._weights += 1
            self.events["weight update"] += 1
        if rng.random() < 0.04:
            self._forward(self._dummy_parts(), ForwardKind.DUMMY)
        parts = self._schedule()
        if parts:
            prompts = sum(part.is_prompt for part in parts)
            kind = ForwardKind.DECODE
            if any(part.drafts for part in parts):
                kind = ForwardKind.VERIFY
            elif prompts:
                kind = ForwardKind.PREFILL if prompts == len(parts) else ForwardKind.MIXED
            if rng.random() < 0.2:
                parts += self._dummy_parts()
            self._forward(parts, kind)
            self._commit(parts)
        found = self._drain()
        if self.errors:
            raise AssertionError("the canary failed") from self.errors[0]
        return found

    def _drain(self) -> list[Violation]:
        names = [guard.group.name for guard in self.monitor.guards]
        found = [Violation.from_row(row, names, RequestNames()) for row in self._reader.read().rows]
        self.violations += found
        return found

    def _schedule(self) -> list[Part]:
        """Decodes of the running requests and prompt chunks, within a token budget."""
        budget = self.rng.choice([8, 24, 48])
        parts: list[Part] = []
        for request in list(self.running):
            if request not in self.running or request.computed < len(request.tokens) - 1:
                continue
            part = self._decode(request)
            if part is not None:
                parts.append(part)
        parts = [part for part in parts if part.request in self.running]
        for request in list(self.running):
            if request in self.running and request.computed < len(request.tokens) - 1:
                part = self._chunk(request, budget)
                if part is not None:
                    budget -= len(part.inputs)
                    parts.append(part)
        while self.waiting and budget > 0 and self.free_rows:
            request = self.waiting[0]
            if request.preempted_in == self.turns:
                break
            self._admit(request)
            part = self._chunk(request, budget)
            if part is None:
                break
            budget -= len(part.inputs)
            parts.append(part)
        # A preemption for the sake of a later one may have taken an earlier one out.
        return [part for part in parts if part.request in self.running]

    def _commit(self, parts: Sequence[Part]) -> None:
        """Take over what a forward computed: sampled tokens, rejected drafts, ends."""
        rows, positions, tokens = [], [], []
        for part in parts:
            request = part.request
            if request is None:
                continue
            if part.is_prompt:
                request.computed = part.prefix + len(part.inputs)
                if not self.options.caches_at_schedule:
                    self._insert(request, request.computed)
                if request.computed < len(request.tokens):
                    continue
                sampled = [self._random_token()]
            else:
                sampled = self._accepted(request, part)
            if request.ends_late:
                self._end(request)
                continue
            start = len(request.tokens)
            request.tokens += sampled
            request.extend_content()
            request.outputs_left -= len(sampled)
            for offset, token in enumerate(sampled):
                rows.append(request.row)
                positions.append(start + offset)
                tokens.append(token)
            if request.outputs_left <= 0 or len(request.tokens) >= _MOST_TOKENS:
                if self.rng.random() < 0.3:
                    request.ends_late = True
                else:
                    self._end(request)
            elif self.swa is not None:
                self._evict_window_of(request)
        if rows:
            self.monitor.record_sampled(
                torch.tensor(rows), torch.tensor(positions), torch.tensor(tokens)
            )

    def _accepted(self, request: Request, part: Part) -> list[int]:
        """Accept a part of the drafts; the slots of the others are freed or kept for later."""
        accepted = part.drafts[: self.rng.randint(0, len(part.drafts))]
        if request.ends_late:
            accepted = []
        request.computed = part.prefix + 1 + len(accepted)
        rejected = request.slots[request.computed :]
        del request.slots[request.computed :]
        if rejected:
            self.events["rejected tokens"] += 1
            if self.options.page_size == 1 and self.rng.random() < 0.5:
                self._free(rejected)
            else:
                request.reserved = rejected + request.reserved
        return [*accepted, self._random_token()]

    # --- requests ---------------------------------------------------------------------------------

    def _arrive(self) -> None:
        self.events["arrival"] += 1
        tokens = self._random_tokens(1, 30)
        if self.rng.random() < 0.75:
            system = self.rng.choice(self._system_prompts)
            tokens = system[: self.rng.randint(1, len(system))] + tokens
        if self.waiting and self.rng.random() < 0.2:
            tokens = self.waiting[-1].tokens[:50] + self._random_tokens(1, 3)
        request = Request(
            uid=self._next_uid,
            key=self._random_key(),
            tokens=tokens,
            outputs_left=self.rng.randint(1, 24),
        )
        request.extend_content()
        self._next_uid += 1
        self.waiting.append(request)

    def _random_key(self) -> int:
        kind = self.rng.random()
        version = str(self._weights) if self._weights > 1 else None
        if kind < 0.6:
            return identity_key(weight_version=version)
        if kind < 0.8:
            return identity_key(lora_id="x", weight_version=version)
        return identity_key(cache_salt="x", weight_version=version)

    def _random_token(self) -> int:
        return self.rng.randrange(_VOCABULARY)

    def _random_tokens(self, least: int, most: int) -> list[int]:
        return [self._random_token() for _ in range(self.rng.randint(least, most))]

    def _admit(self, request: Request) -> None:
        """Give the request a row and the prefix that the tree has for it."""
        self.events["admission"] += 1
        self.waiting.remove(request)
        request.row = self.free_rows.pop(self.rng.randrange(len(self.free_rows)))
        self.running.append(request)
        nodes = self._match(request)
        for node in nodes:
            node.users += 1
        request.nodes = nodes
        request.slots = [slot for node in nodes for slot in node.slots]
        request.computed = len(request.slots)
        self._fill_row(request, 0)

    def _chunk(self, request: Request, budget: int) -> Part | None:
        """The next tokens of a prompt (or of what a preempted request recomputes)."""
        count = min(budget, len(request.tokens) - request.computed)
        if count <= 0 or not self._grow(request, count):
            return None
        part = self._part(request, request.tokens[request.computed : request.computed + count])
        part.is_prompt = True
        if self.options.caches_at_schedule:
            self._insert(request, request.computed + count, folds=False)
        return part

    def _decode(self, request: Request) -> Part | None:
        drafts = []
        if self.options.speculation and len(request.tokens) + 8 < _MOST_TOKENS:
            drafts = self._random_tokens(0, self.options.speculation)
        if not self._grow(request, 1 + len(drafts)):
            return None
        part = self._part(request, [request.tokens[request.computed], *drafts])
        part.drafts = drafts
        return part

    def _part(self, request: Request, inputs: list[int]) -> Part:
        request.scheduled_in = self.turns
        start, end = request.computed, request.computed + len(inputs)
        content = request.content[start:end]
        for position in range(start + len(content), end):
            before = content[-1] if content else request.content[-1]
            content.append(mixed(before, inputs[position - start], position))
        return Part(
            request=request,
            row=request.row,
            prefix=start,
            inputs=list(inputs),
            positions=list(range(start, end)),
            slots=request.slots[start:end],
            content=content,
        )

    def _dummy_parts(self) -> list[Part]:
        self.events["padding"] += 1
        return [
            Part(
                request=None,
                row=PADDING_ROW,
                prefix=self.rng.choice([0, 0, 3]),
                inputs=[0],
                positions=[0],
                slots=[self.rng.choice([0, -1])],
                content=[NOTHING_STORED],
            )
            for _ in range(self.rng.randint(1, 3))
        ]

    def _end(self, request: Request) -> None:
        self.events["end"] += 1
        self._release(request, keeps=True)

    def _abort(self, request: Request) -> None:
        self.events["abort"] += 1
        self._release(request, keeps=self.rng.random() < 0.5)

    def _preempt(self, request: Request) -> None:
        self.events["preemption"] += 1
        self._release(request, keeps=self.rng.random() < 0.5)
        request.preempted_in = self.turns
        if not request.ends_late:
            self.waiting.insert(0, request)

    def _release(self, request: Request, *, keeps: bool) -> None:
        if keeps:
            self._insert(request, request.computed, folds=True)
        private = request.slots[len(request.nodes) * self.options.page_size :]
        self._free(private + request.reserved)
        if self.fires("request cleaned up twice"):
            self._free(private + request.reserved)
        for node in request.nodes:
            node.users -= 1
            node.used_at = self.step
        request.slots, request.reserved, request.nodes = [], [], []
        request.computed = 0
        self.running.remove(request)
        self.free_rows.append(request.row)

    # --- the prefix tree --------------------------------------------------------------------------

    def _match(self, request: Request) -> list[Node]:
        """The longest usable prefix: at least one token is left to compute."""
        size = self.options.page_size
        key = request.key
        if self.fires("identity ignored"):
            others = [other for other in self.roots if other != key and self.roots[other].children]
            key = self.rng.choice(others) if others else key
        nodes: list[Node] = []
        node = self.roots.setdefault(key, Node(None))
        limit = (len(request.tokens) - 1) // size
        wrong = self.fires("wrong prefix")
        while len(nodes) < limit:
            start = len(nodes) * size
            tokens = tuple(request.tokens[start : start + size])
            if wrong and node.children and self.rng.random() < 0.3:
                tokens = self.rng.choice(list(node.children))
            child = node.children.get(tokens)
            if child is None and key == request.key:
                child = self._load(request, node, tokens, start)
            if child is None:
                break
            child.used_at = self.step
            nodes.append(child)
            node = child
        while nodes and not self._window_is_there([s for n in nodes for s in n.slots]):
            nodes.pop()
        if nodes:
            self.events["prefix hit"] += 1
        return nodes

    def _window_is_there(self, slots: Sequence[int]) -> bool:
        if self.swa is None:
            return True
        return all(int(self.lookup[slot]) > 0 for slot in slots[-self.options.window :])

    def _insert(self, request: Request, end: int, *, folds: bool = True) -> None:
        """Put the request's whole pages below ``end`` into the tree; duplicates are folded."""
        size = self.options.page_size
        node = (
            request.nodes[-1] if request.nodes else self.roots.setdefault(request.key, Node(None))
        )
        first_folded = None
        while (len(request.nodes) + 1) * size <= end:
            start = len(request.nodes) * size
            tokens = tuple(request.tokens[start : start + size])
            mine = request.slots[start : start + size]
            child = node.children.get(tokens)
            if child is None:
                child = Node(node, tokens, list(mine))
                node.children[tokens] = child
            elif child.slots != mine:
                if not folds:
                    break
                if not self._fold(request, child, start, mine, end):
                    break
                first_folded = start if first_folded is None else first_folded
            child.users += 1
            child.used_at = self.step
            request.nodes.append(child)
            node = child
        if first_folded is not None:
            self._fill_row(request, first_folded)

    def _fold(self, request: Request, child: Node, start: int, mine: list[int], end: int) -> bool:
        """The tree has this page already: one copy stays, the other is freed."""
        size = self.options.page_size
        if self.swa is not None and start + size > end - self.options.window:
            has_window = all(int(self.lookup[slot]) > 0 for slot in child.slots)
            if not has_window and all(int(self.lookup[slot]) > 0 for slot in mine):
                if child.users:
                    return False
                self.events["tombstone filled"] += 1
                self._free(child.slots)
                child.slots = list(mine)
                return True
        self.events["fold"] += 1
        self._free(child.slots if self.fires("fold frees the kept copy") else mine)
        request.slots[start : start + size] = child.slots
        return True

    def _nodes(self) -> Iterable[Node]:
        pending = list(self.roots.values())
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            if node.parent is not None:
                yield node

    def _evict(self, pages: int) -> int:
        """Evict the pages that were not used longest."""
        evicted = 0
        ignores_users = self.fires("evicts a page in use")
        while evicted < pages:
            leaves = [n for n in self._nodes() if not n.children and (not n.users or ignores_users)]
            if not leaves:
                break
            for node in sorted(leaves, key=lambda n: n.used_at)[: pages - evicted]:
                self.events["eviction"] += 1
                if self.options.host_tier and self.rng.random() < 0.6:
                    self._offload(node)
                assert node.parent is not None
                del node.parent.children[node.tokens]
                self._free(node.slots)
                evicted += 1
            if ignores_users:
                break
        return evicted

    def _evict_window_of_tree(self) -> None:
        """Free sliding-window slots of pages nobody uses; their full slots stay."""
        if self.swa is None:
            return
        idle = [node for node in self._nodes() if not node.users]
        for node in self.rng.sample(idle, min(len(idle), 6)):
            self.events["window eviction"] += 1
            self._free_window(node.slots)

    def _evict_window_of(self, request: Request) -> None:
        end = request.computed - self.options.window - self.rng.randint(0, 4)
        if self.fires("window evicted too far"):
            end = request.computed - 2
        private = request.slots[len(request.nodes) : max(end, 0)]
        self._free_window(private)

    # --- slots ------------------------------------------------------------------------------------

    def _grow(self, request: Request, count: int) -> bool:
        """Slots for ``count`` more tokens; evicts and preempts for them."""
        target = request.computed + count
        while len(request.slots) < target:
            if request.reserved:
                request.slots.append(request.reserved.pop(0))
                continue
            last = request.slots[-1] + 1 if request.slots else 0
            if len(request.slots) % self.options.page_size and last % self.options.page_size:
                self._hand_out([last])
                request.slots.append(last)
                continue
            pages = 1 + (target - len(request.slots) - 1) // self.options.page_size
            if not self._make_room(request, pages):
                return False
            for _ in range(pages):
                page = self.full.free_pages.pop()
                first = page * self.options.page_size
                missing = target - len(request.slots)
                slots = list(range(first, first + min(missing, self.options.page_size)))
                self._hand_out(slots)
                request.slots += slots
        self._fill_row(request, request.computed)
        return True

    def _make_room(self, request: Request, pages: int) -> bool:
        for _ in range(_ROWS):
            missing = pages - len(self.full.free_pages)
            if self.swa is not None:
                missing = max(missing, pages - len(self.swa.free_pages))
            if missing <= 0:
                return True
            if self._evict(missing) == 0:
                # Pages that a forward fills stand in the tree before it: it has to run.
                others = [
                    other
                    for other in self.running
                    if other is not request
                    and not (self.options.caches_at_schedule and other.scheduled_in == self.turns)
                ]
                if not others:
                    break
                self._preempt(others[-1])
        self._preempt(request)
        return False

    def _hand_out(self, slots: Sequence[int]) -> None:
        self.events["alloc"] += 1
        if self.options.tracks_allocation:
            self.monitor.guards[0].events.alloc(torch.tensor(slots))
        if self.swa is not None and not self._keeps_stale_mapping(slots):
            window_slots = [self.swa.free_pages.pop() for _ in slots]
            self.monitor.guards[1].events.alloc(torch.tensor(window_slots))
            self.lookup[list(slots)] = torch.tensor(window_slots)

    def _keeps_stale_mapping(self, slots: Sequence[int]) -> bool:
        """Of a faulty free: the slots' next owner gets their full part only."""
        return any(int(self.lookup[slot]) > 0 for slot in slots)

    def _free(self, slots: Sequence[int]) -> None:
        if not slots:
            return
        self.events["free"] += 1
        size = self.options.page_size
        pages = sorted({slot // size for slot in slots})
        if self.swa is not None:
            if self.fires("window mapping kept at free"):
                mapped = [int(self.lookup[slot]) for slot in slots if int(self.lookup[slot]) > 0]
                self._return_window(mapped)
            else:
                self._free_window(slots)
        self.full.free_pages += pages
        self.rng.shuffle(self.full.free_pages)
        if self.options.tracks_allocation:
            events = self.monitor.guards[0].events
            if size == 1:
                events.free(torch.tensor(slots))
            else:
                events.free_pages(torch.tensor(pages), page_size=size)

    def _free_window(self, slots: Sequence[int]) -> None:
        mapped = [int(self.lookup[slot]) for slot in slots if int(self.lookup[slot]) > 0]
        self.lookup[list(slots)] = 0
        self._return_window(mapped)

    def _return_window(self, mapped: list[int]) -> None:
        assert self.swa is not None
        if mapped:
            self.swa.free_pages += mapped
            self.rng.shuffle(self.swa.free_pages)
            self.monitor.guards[1].events.free(torch.tensor(mapped))

    def _fill_row(self, request: Request, start: int) -> None:
        size = self.entry_size
        for position in range(start - start % size, len(request.slots), size):
            self.table[request.row, position // size] = request.slots[position] // size

    def _move_a_page(self) -> None:
        """Compaction: a page of the tree goes to another place, and everybody follows."""
        nodes = list(self._nodes())
        if not nodes or not self.full.free_pages:
            return
        self.events["move"] += 1
        node = self.rng.choice(nodes)
        size = self.options.page_size
        first = self.full.free_pages.pop() * size
        old, new = list(node.slots), list(range(first, first + size))
        if not self.fires("move without bytes"):
            self.full.kv[:, new] = self.full.kv[:, old]
            self.full.held[new] = self.full.held[old]
        source, destination = torch.tensor(old), torch.tensor(new)
        if self.options.tracks_allocation:
            self.monitor.guards[0].events.alloc(destination)
        if self.options.tracks_allocation and self.rng.random() < 0.5:
            self.monitor.guards[0].events.move(source, destination)
        else:
            self.monitor.copy_slots(0, source, destination)
        if self.swa is not None:
            self.lookup[new] = self.lookup[old]
            self.lookup[old] = 0
        node.slots = new
        for request in self.running:
            if node in request.nodes:
                start = request.nodes.index(node) * size
                request.slots[start : start + size] = new
                if not self.fires("move forgets a row"):
                    self._fill_row(request, start)
        self._free(old)

    def _move_a_row(self) -> None:
        if not self.running or not self.free_rows:
            return
        self.events["row move"] += 1
        request = self.rng.choice(self.running)
        new = self.free_rows.pop(0)
        self.table[new] = self.table[request.row]
        self._moved_rows[0].append(request.row)
        self._moved_rows[1].append(new)
        self.free_rows.append(request.row)
        request.row = new

    def _flush(self, *, sleeps: bool) -> None:
        self.events["sleep" if sleeps else "flush"] += 1
        for request in list(self.running):
            self._preempt(request)
        self.roots = {}
        self.full.clear()
        self.lookup[:] = 0
        if self.swa is not None:
            self.swa.clear()
        if self.options.tracks_allocation:
            for guard in self.monitor.guards:
                guard.events.reset()
        if sleeps:
            self.monitor.forget_everything()
            for pool in self._pools():
                pool.kv[:] = self.rng.randrange(1 << 60)
                pool.held[:] = NOTHING_STORED

    def _pools(self) -> list[Pool]:
        return [self.full] if self.swa is None else [self.full, self.swa]

    # --- the host tier ----------------------------------------------------------------------------

    def _offload(self, node: Node) -> None:
        self.events["offload"] += 1
        tokens: tuple[int, ...] = ()
        root = node
        while root.parent is not None:
            tokens = root.tokens + tokens
            root = root.parent
        key = next(key for key, candidate in self.roots.items() if candidate is root)
        carried = None
        if self.options.host_tier == "carried":
            carried = self.monitor.export_slots(0, torch.tensor(node.slots))
        page = HostPage(
            kv=self.full.kv[:, node.slots].copy(),
            held=self.full.held[node.slots].copy(),
            carried=carried,
        )
        self.host[key, tokens] = page

    def _load(
        self, request: Request, parent: Node, tokens: tuple[int, ...], start: int
    ) -> Node | None:
        """Bring the next page back from the host, if it is there."""
        path = tuple(request.tokens[: start + len(tokens)])
        page = self.host.get((request.key, path))
        if page is None or not self.full.free_pages:
            return None
        self.events["load"] += 1
        size = self.options.page_size
        first = self.full.free_pages.pop() * size
        slots = list(range(first, first + size))
        self._hand_out(slots)
        if self.fires("load of another page"):
            page = self.rng.choice(list(self.host.values()))
        copies = not self.fires("load without bytes")
        if not self.fires("load skipped"):
            self._bring_in(page, slots, tokens, start, parent, request, copies=copies)
        node = Node(parent, tokens, slots, used_at=self.step)
        parent.children[tokens] = node
        return node

    def _bring_in(
        self,
        page: HostPage,
        slots: list[int],
        tokens: tuple[int, ...],
        start: int,
        parent: Node,
        request: Request,
        *,
        copies: bool,
    ) -> None:
        def copy_bytes() -> None:
            if copies:
                self.full.kv[:, slots] = page.kv
                self.full.held[slots] = page.held

        where = torch.tensor(slots)
        if page.carried is None:
            copy_bytes()
            self.monitor.adopt_slots(
                0,
                where,
                torch.tensor(tokens),
                torch.arange(start, start + len(tokens)),
                previous_slot=parent.slots[-1] if parent.slots else -1,
                identity_key=request.key,
            )
        elif self.rng.random() < 0.5:
            self.monitor.import_slots(0, where, page.carried, verify=False)
            copy_bytes()
            self.monitor.verify_imported(0, where, page.carried)
        else:
            copy_bytes()
            self.monitor.import_slots(0, where, page.carried)

    # --- the forward ------------------------------------------------------------------------------

    def _forward(self, parts: list[Part], kind: ForwardKind) -> None:
        self.step += 1
        self.events["forward"] += 1
        self.before_step(parts)
        step = self._forward_step(parts, kind)
        looks_later = self.monitor.forward_begins(arrays_stay=self.arrays_stay)
        if looks_later:  # beside the forward and behind it, in turn
            self.monitor.forward_follows(longest_extend=256 if self.step % 2 else 1)
        else:
            self.monitor.look_at(step)
        self.under_forward(parts)
        self._compute(parts)
        if looks_later:
            self.events["look later"] += 1
            with self.monitor.forward_is_launched():
                self.monitor.look_at(step)
        self.monitor.after_forward()

    def before_step(self, parts: list[Part]) -> None:
        """Overridden where faults are planted."""

    def under_forward(self, parts: list[Part]) -> None:
        """Overridden where faults are planted."""

    def _forward_step(self, parts: Sequence[Part], kind: ForwardKind) -> ForwardStep:
        def flat(values: Iterable[int]) -> torch.Tensor:
            return torch.tensor(list(values), dtype=torch.int64)

        full = flat(slot for part in parts for slot in part.slots)
        out_cache_loc = [full]
        if self.swa is not None:
            translated = torch.empty_like(full)
            translate_out_cache_loc(
                out_cache_loc=full, full_to_swa_index_mapping=self.lookup, output=translated
            )
            out_cache_loc.append(translated)
        self._written = [slots.tolist() for slots in out_cache_loc]
        prefix = np.array([part.prefix for part in parts], dtype=np.int64)
        extend = np.array([len(part.inputs) for part in parts], dtype=np.int64)
        keys = [part.request.key if part.request is not None else 0 for part in parts]
        moved, self._moved_rows = self._moved_rows, ([], [])
        return ForwardStep(
            kind=kind,
            step=self.step,
            request_rows=flat(part.row for part in parts),
            request_uids=flat(part.request.uid if part.request else -1 for part in parts),
            prefix_lens=torch.from_numpy(prefix),
            extend_lens=torch.from_numpy(extend),
            max_prefix_len=int(prefix.max(initial=0)),
            input_ids=flat(token for part in parts for token in part.inputs),
            positions=flat(position for part in parts for position in part.positions),
            out_cache_loc=tuple(out_cache_loc),
            identity_keys=flat(keys) if any(keys) else None,
            host_prefix_lens=prefix,
            host_extend_lens=extend,
            host_tokens=tuple(
                HostTokens(
                    batch_row=index,
                    request_row=part.row,
                    request_uid=part.request.uid,
                    prefix_len=part.prefix,
                    num_tokens=part.prefix + len(part.inputs),
                    source=np.array(part.request.tokens, dtype=np.int64),
                    identity_key=part.request.key,
                )
                for index, part in enumerate(parts)
                if part.is_prompt and part.request is not None
            ),
            moved_rows=(np.array(moved[0]), np.array(moved[1])) if moved[0] else None,
        )

    def _compute(self, parts: Sequence[Part]) -> None:
        """The model: store K/V of the new tokens, read the prefixes through the table."""
        content = [number for part in parts for number in part.content]
        for pool, slots in zip(self._pools(), self._written, strict=True):
            real = [index for index, slot in enumerate(slots) if slot > 0]
            pool.store([slots[i] for i in real], [content[i] for i in real])
        for part in parts:
            if part.request is None or part.prefix == 0:
                continue
            for name, pool, slots, start in self._reads(part):
                inside = (slots > 0) & (slots < pool.num_slots)
                held = np.where(inside, pool.held[np.where(inside, slots, 0)], DAMAGED)
                wanted = np.array(part.request.content[start : part.prefix], dtype=np.int64)
                for index in np.flatnonzero(held != wanted).tolist():
                    self.harmful_reads.append((self.step, name, int(slots[index]), start + index))

    def _reads(self, part: Part) -> Iterable[tuple[str, Pool, Int64s, int]]:
        size = self.entry_size
        positions = np.arange(part.prefix)
        entries = self.table.numpy()[part.row, positions // size].astype(np.int64)
        slots = entries * size + positions % size
        yield "full", self.full, slots, 0
        if self.swa is not None:
            start = max(0, part.prefix - self.options.window)
            known = (slots > 0) & (slots < self.full.num_slots)
            mapped = np.where(known, self.lookup.numpy()[np.where(known, slots, 0)], -1)
            yield "swa", self.swa, mapped[start:], start
