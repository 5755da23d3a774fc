"""The incident that is replayed: what its file says of the root and of who read it."""

from __future__ import annotations

from dataclasses import dataclass

from kvcanary_plugin.incident_file import Evidence, Group, Part, Place, Request
from kvcanary_plugin.kernels.consts import PADDING_SLOT


@dataclass(frozen=True, slots=True)
class Case:
    """Evidence that has been checked, its root, and what follows from the two alone."""

    evidence: Evidence
    root: Place

    @property
    def root_group(self) -> Group:
        return next(group for group in self.evidence.groups if group.name == self.root.group)

    @property
    def slot_before(self) -> int:
        """The slot that the root's entry of the page table named before its forward."""
        before = self.root.slot_before
        return before if before is not None else self.root.slot

    @property
    def reader(self) -> Request | None:
        return next((r for r in self.evidence.requests if r.role == "reader"), None)

    def is_reader(self, part: Part) -> bool:
        return self.reader is not None and part.uid == self.reader.uid

    @property
    def end_of_rows(self) -> int:
        """Behind the last position of the reader's rows, 0 without a reader."""
        if self.reader is None:
            return 0
        return self.reader.first + max((len(row.slots) for row in self.reader.rows), default=0)

    @property
    def end_of_reader(self) -> int:
        """Behind the last position of the reader of which the file tells."""
        assert self.reader is not None
        # A context that the file holds to its end may still reach beyond the page table.
        return min(self.reader.prefix_len + self.reader.extend_len, self.end_of_rows)

    @property
    def reader_key(self) -> int:
        """Identity key of the reader, 0 for none."""
        return next(
            (
                part.identity_key
                for forward in self.evidence.window
                for part in forward.parts
                if self.is_reader(part)
            ),
            0,
        )

    def is_read(self, group: Group, position: int) -> bool:
        """Whether the reader's forward reads a position in a group."""
        assert self.reader is not None
        prefix, window = self.reader.prefix_len, group.swa_window_size
        return (prefix - window if window else 0) <= position < prefix

    @property
    def root_is_written_in_window(self) -> bool:
        """Whether the reader wrote the root's position into a real slot in the window."""
        return any(
            self.is_reader(part)
            and 0 <= (entry := self._entry_of_root(part)) < len(part.tokens)
            and part.slots[self.root.group][entry] > PADDING_SLOT
            for forward in self.evidence.window
            for part in forward.parts
        )

    def _entry_of_root(self, part: Part) -> int:
        return self.root.read_position - part.prefix_len - part.first
