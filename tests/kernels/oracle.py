"""The contract once more, in Python ints alone: no torch, no code of the package.

Written from the text of the contract, so that a mistake that both implementations share is seen.
Every function works on plain dicts and lists and returns what must be the case afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MASK = 2**64 - 1
ANCHOR = 0xC0FFEE1234567890
GOLDEN = 0x9E3779B97F4A7C15
FREE, ALLOCATED, WRITTEN, SEALED, EXTERNAL = range(5)
# The columns of a violation row before its sequence.
ROW = (
    *("kind", "slot", "position", "stored_token", "expected_token", "stored_chain"),
    *("expected_aux", "bits", "step", "uid", "writer", "writer_step"),
    *("batch_row", "state", "expected_position"),
)


def signed(value: int) -> int:
    value &= MASK
    return value if value < 2**63 else value - 2**64


def splitmix64(x: int) -> int:
    x &= MASK
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & MASK
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def mix3(a: int, b: int, c: int) -> int:
    return splitmix64(splitmix64(splitmix64(a) ^ b & MASK) ^ c & MASK)


def fold(strips: list[bytes]) -> int:
    """The fold over the bytes that a slot owns in each source."""
    total = 0
    for source, strip in enumerate(strips):
        for index in range(0, len(strip), 8):
            word = int.from_bytes(strip[index : index + 8], "little")
            key = splitmix64(source + 1) + (index // 8 + 1) * GOLDEN
            total += splitmix64(word ^ key & MASK)
    return splitmix64(total)


@dataclass
class Slot:
    """A record and what the slot table holds about it."""

    token: int = 0
    position: int = 0
    prev_hash: int = 0
    real_kv_hash: int = 0
    strips: list[bytes] = field(default_factory=list)  # real KV as this launch folds it
    state: int = -1
    generation: int = 0
    owner: int = -1
    writer: int = -1
    writer_step: int = -1

    def chain(self) -> int:
        return mix3(self.prev_hash, self.token, self.position)

    def fold(self) -> int:
        """Folded real KV; 0 in mode NONE or without sources (there are no strips then)."""
        return signed(fold(self.strips)) if self.strips else 0


@dataclass
class World:
    """What a launch sees and leaves behind. ``rows`` are the violations in order."""

    slots: list[Slot]
    has_table: bool
    tracks_allocation: bool
    asserts_positions: bool
    kernel_kind: int
    step: int
    rows: list[list[int]] = field(default_factory=list)
    counted: int = 0

    def inside(self, slot: int) -> bool:
        return 0 <= slot < len(self.slots)

    def in_flight(self, slot: int) -> bool:
        return self.has_table and self.step != -1 and self.slots[slot].writer_step == self.step

    def row(self, slot: int, bits: int, **columns: int) -> None:
        values = dict.fromkeys(ROW, -1)
        values |= {"kind": self.kernel_kind, "slot": slot, "bits": bits, "step": self.step}
        if self.has_table and self.inside(slot):
            about = self.slots[slot]
            values |= {"writer": about.writer, "writer_step": about.writer_step}
            values["state"] = about.state
        values |= columns
        self.rows.append([values[name] for name in ROW])


# ---- write ---------------------------------------------------------------------------------------


@dataclass
class Request:
    begin: int
    end: int
    seed: int
    uid: int
    key: int


def write(
    world: World,
    requests: list[Request],
    tokens: list[int],
    positions: list[int],
    slots: list[int],
    expected: list[tuple[int, int]] | None,
) -> None:
    """The write step; ``requests`` lie inside the inputs."""
    old = [(slot.chain(), slot.position) for slot in world.slots]
    last_writer = {}
    for number, request in enumerate(requests):
        for entry in range(request.begin, request.end):
            last_writer[slots[entry]] = (number, entry)

    def follows(number: int) -> tuple[int, int] | None:
        """(request, entry) of this plan that writes the seed, if it is written right now."""
        seed = requests[number].seed
        if not 0 < seed < len(world.slots) or not world.in_flight(seed):
            return None
        return last_writer.get(seed)

    def ends_in_a_circle(number: int) -> bool:
        seen = set()
        while (link := follows(number)) is not None:
            if number in seen:
                return True
            seen.add(number)
            number = link[0]
        return False

    def start(number: int) -> tuple[int, int | None]:
        """Hash before the first entry, and the position of the record before it."""
        request = requests[number]
        link = None if ends_in_a_circle(number) else follows(number)
        if link is not None:
            _, entry = link
            return mix3(hash_before(*link), tokens[entry], positions[entry]), positions[entry]
        if world.inside(request.seed):
            return old[request.seed]
        return splitmix64(ANCHOR ^ request.key & MASK), None

    def hash_before(number: int, entry: int) -> int:
        running, _ = start(number)
        for earlier in range(requests[number].begin, entry):
            if slots[earlier] >= 0:
                running = mix3(running, tokens[earlier], positions[earlier])
        return running

    hashes = [
        {entry: hash_before(number, entry) for entry in range(request.begin, request.end)}
        for number, request in enumerate(requests)
    ]
    before = [start(number)[1] for number in range(len(requests))]
    for number, request in enumerate(requests):
        who = {"uid": request.uid, "batch_row": number}
        if request.seed >= len(world.slots) and request.begin < request.end:
            world.row(request.seed, 1 << 8, **who)
        previous = before[number]
        for entry in range(request.begin, request.end):
            slot, token, position = slots[entry], tokens[entry], positions[entry]
            if slot < 0:
                continue
            entry_hash = signed(hashes[number][entry])
            seen = who | {"position": position, "stored_token": token, "stored_chain": entry_hash}
            wanted = {}
            if expected is not None:
                want_token, want_position = expected[entry]
                wanted = _expects(want_token, want_position)
                bits = (token != want_token) << 3 | (position != want_position) << 4
                if bits:
                    world.row(slot, bits, **seen, **wanted)
            if previous is not None:
                if world.asserts_positions and position != signed(previous + 1):
                    world.row(slot, 1 << 4, **seen, **_expects(token, signed(previous + 1)))
                previous = position
            if not world.inside(slot):
                world.row(slot, 1 << 8, **seen, **wanted)
                continue
            record = world.slots[slot]
            if world.has_table and slot > 0:
                foreign = record.owner not in (-1, request.uid) and request.uid != -1
                if world.tracks_allocation and foreign:
                    world.row(slot, 1 << 9, **seen, **wanted)
                if record.owner == -1:
                    record.owner = request.uid
                record.writer, record.writer_step = request.uid, world.step
                if not (world.tracks_allocation and record.state == FREE):
                    record.state = WRITTEN
            record.token, record.position, record.prev_hash = token, position, entry_hash
            record.real_kv_hash = record.fold()
            world.counted += 1


def _expects(token: int, position: int) -> dict[str, int]:
    return {"expected_token": token, "expected_aux": position, "expected_position": position}


# ---- verify --------------------------------------------------------------------------------------


@dataclass
class Entry:
    slot: int
    position: int
    prev_slot: int
    token: int = -1
    key: int = 0
    uid: int = -1
    batch_row: int = -1
    prefix_hash: int | None = None
    readable: bool = True


def verify(world: World, entries: list[Entry]) -> None:
    """The verify step over entries that are no padding."""
    for entry in entries:
        about = {
            "expected_token": entry.token,
            "expected_position": entry.position,
            "uid": entry.uid,
            "batch_row": entry.batch_row,
        }
        if not entry.readable or not world.inside(entry.slot) or entry.slot == 0:
            world.counted += 1
            world.row(entry.slot, 1 << 8, **about)
            continue
        if world.in_flight(entry.slot):
            continue
        world.counted += 1
        record = world.slots[entry.slot]
        bits, chain = 0, record.prev_hash
        if entry.prev_slot == -1:
            chain = signed(splitmix64(ANCHOR ^ entry.key & MASK))
        elif not world.inside(entry.prev_slot):
            bits |= 1 << 8
        elif entry.prev_slot != 0 and not world.in_flight(entry.prev_slot):
            chain = signed(world.slots[entry.prev_slot].chain())
        bits |= (record.prev_hash != chain) << 0
        bits |= (record.position != entry.position) << 1
        bits |= (entry.token not in (-1, record.token)) << 5
        bits |= (record.state == FREE) << 7
        if entry.prefix_hash is not None:
            bits |= (signed(record.chain()) != entry.prefix_hash) << 12
        if record.strips and record.state in (-1, SEALED, EXTERNAL):
            bits |= (record.fold() != record.real_kv_hash) << 2
        if record.state == ALLOCATED:
            bits = 1 << 6
        if bits:
            world.row(
                entry.slot,
                bits,
                **about,
                position=record.position,
                stored_token=record.token,
                stored_chain=record.prev_hash,
                expected_aux=chain,
            )


def scrub(world: World, slots: list[int]) -> None:
    for slot in slots:
        if not world.inside(slot) or slot == 0:
            continue
        record = world.slots[slot]
        if not record.strips or record.state not in (-1, SEALED, EXTERNAL):
            continue
        world.counted += 1
        if record.fold() != record.real_kv_hash:
            world.row(
                slot,
                1 << 2,
                position=record.position,
                stored_token=record.token,
                stored_chain=record.prev_hash,
            )


def seal(world: World, slots: list[int]) -> None:
    for slot in slots:
        if world.inside(slot) and slot != 0 and world.slots[slot].strips:
            record = world.slots[slot]
            record.real_kv_hash = record.fold()
            world.counted += 1
            if record.state == WRITTEN:
                record.state = SEALED


# ---- the page table ------------------------------------------------------------------------------


@dataclass
class Table:
    pages: list[list[int]]
    page_size: int
    window: int
    lookup: list[int] | None

    def value(self, row: int, position: int) -> int | None:
        """The slot in the table, None outside it."""
        if not 0 <= row < len(self.pages) or position >= len(self.pages[0]) * self.page_size:
            return None
        page = self.pages[row][position // self.page_size]
        if self.page_size == 1 or page <= 0:
            return page
        return page * self.page_size + position % self.page_size

    def start(self, prefix: int) -> int:
        return max(0, prefix - self.window) if self.window else 0

    def predecessor(self, row: int, position: int, start: int) -> int:
        if position == 0:
            return -1
        if self.lookup is None and self.window and position - 1 < start:
            return 0
        value = self.value(row, position - 1)
        if value is None:
            return 2**63 - 1
        if self.lookup is not None:
            value = self.lookup[value] if 0 <= value < len(self.lookup) else 0
        return max(value, 0)

    def live(self, row: int, position: int) -> tuple[int, bool]:
        """Slot to verify, and whether it may be read."""
        value = self.value(row, position)
        if value is None:
            return -1, False
        if value <= 0 or self.lookup is None:
            return value, value > 0
        if value >= len(self.lookup):
            return value, False
        return self.lookup[value], self.lookup[value] > 0


def table_entries(
    table: Table,
    *,
    batch_row: int,
    row: int,
    prefix: int,
    uid: int,
    key: int,
    history: list[int],
    token_offset: int,
    prefix_hash: int | None,
) -> list[Entry]:
    """What one request that is no padding reads; ``history`` are the tokens known of it."""
    if prefix <= 0:
        return []

    def token_at(position: int) -> int:
        place = position + token_offset
        return history[place] if 0 <= place < len(history) else -1

    def outside(position: int) -> Entry:
        return Entry(
            slot=-1,
            position=position,
            prev_slot=-1,
            token=token_at(position),
            uid=uid,
            batch_row=batch_row,
            readable=False,
        )

    if not 0 <= row < len(table.pages):
        return [outside(0)]
    entries = []
    start = table.start(prefix)
    for position in range(start, prefix):
        if table.value(row, position) is None:
            return [*entries, outside(position)]
        slot, readable = table.live(row, position)
        entries.append(
            Entry(
                slot=slot,
                position=position,
                prev_slot=table.predecessor(row, position, start),
                token=token_at(position),
                key=key,
                uid=uid,
                batch_row=batch_row,
                prefix_hash=prefix_hash if position == prefix - 1 else None,
                readable=readable,
            )
        )
    return entries
