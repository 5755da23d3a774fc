"""Lifecycle events of slots, and how a launch receives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvcanary_plugin.kernels.arguments import INTEGERS, check_vector, refuse
from kvcanary_plugin.kernels.consts import EventKind

EVENT_WORDS = 6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotEvent:
    """One thing that happened to some slots, in the order in which it happened.

    Fields:
        kind: what happened.
        slots: int32 | int64 [n], contiguous, on the records' device: slots, or pages when
            ``page_size`` is above 1. None for RESET, which concerns every slot. Entries at or
            below 0 and beyond the pool are skipped.
        destinations: MOVE only: where each of ``slots`` went; same shape and dtype.
        page_size: slots of each entry; 1 means that entries are slots.
    """

    kind: EventKind
    slots: torch.Tensor | None = None
    destinations: torch.Tensor | None = None
    page_size: int = 1


def check_events(events: Sequence[SlotEvent], *, device: torch.device) -> None:
    """ValueError for an event whose tensors a kernel cannot read."""
    for index, event in enumerate(events):
        name = f"events[{index}]"
        if event.page_size < 1:
            raise refuse(f"{name}.page_size", "be 1 or more", event.page_size)
        if event.kind == EventKind.RESET:
            continue
        if event.slots is None:
            raise refuse(f"{name}.slots", f"be given for {event.kind.name}", None)
        check_vector(f"{name}.slots", event.slots, device=device, dtypes=INTEGERS)
        if event.kind == EventKind.MOVE:
            if event.destinations is None:
                raise refuse(f"{name}.destinations", "be given for MOVE", None)
            check_vector(
                f"{name}.destinations",
                event.destinations,
                device=device,
                dtypes=(event.slots.dtype,),
                size=event.slots.numel(),
                size_like=f"{name}.slots",
            )


def pack_events(events: Sequence[SlotEvent], *, device: torch.device) -> torch.Tensor | None:
    """int64 [k, 6] on the host (struct Event in record.h), or None when nothing happened.

    The rows hold addresses: the tensors of ``events`` must live until the launch has run.
    """
    if not events:
        return None
    check_events(events, device=device)
    rows = np.zeros((len(events), EVENT_WORDS), dtype=np.int64)
    for index, event in enumerate(events):
        slots, destinations = event.slots, event.destinations
        rows[index] = (
            event.kind,
            slots.data_ptr() if slots is not None else 0,
            slots.shape[0] if slots is not None else 0,
            slots.itemsize if slots is not None else 8,
            event.page_size,
            destinations.data_ptr() if destinations is not None else 0,
        )
    return torch.from_numpy(rows)
