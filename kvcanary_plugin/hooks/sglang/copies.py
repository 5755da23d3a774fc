"""K/V that SGLang copies outside of a forward: between slots, to the host and back.

The pool object of one engine is wrapped, not its class: the copies of a draft model's pool are its
own. The records of the slots go wherever their bytes go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvcanary_plugin.carried import CarriedRecords
from kvcanary_plugin.guard import GroupGuard
from kvcanary_plugin.monitor import CanaryMonitor

_Carried = tuple[CarriedRecords | None, ...]


class _ListWithRecords(list[Any]):
    carried: _Carried


class _DictWithRecords(dict[Any, Any]):
    carried: _Carried


class _TupleWithRecords(tuple[Any, ...]):
    carried: _Carried


# The engine keeps what it copied to the host as one of these and hands it back as it is.
_WITH_RECORDS: dict[type, type] = {
    list: _ListWithRecords,
    dict: _DictWithRecords,
    tuple: _TupleWithRecords,
}


class UnknownCopyError(RuntimeError):
    """Bytes came back that this hook did not see leave."""


def follow_copies(pool: Any, monitor: CanaryMonitor) -> PoolCopies:
    """Let the records of ``monitor``'s groups follow the copies that ``pool`` makes from now on."""
    copies = PoolCopies(monitor)
    for method, around in (
        ("move_kv_cache", copies.around_move),
        ("get_cpu_copy", copies.around_get),
        ("load_cpu_copy", copies.around_load),
    ):
        if hasattr(pool, method):
            setattr(pool, method, _wrapped(getattr(pool, method), around))
    return copies


def _wrapped(original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    return wrapper


class PoolCopies:
    """What happens to the records when a pool copies K/V."""

    def __init__(self, monitor: CanaryMonitor) -> None:
        self._monitor = monitor
        # While somebody else writes the records of what is moved.
        self.moves_are_followed = True

    def around_move(
        self,
        original: Callable[..., Any],
        tgt_loc: torch.Tensor,
        src_loc: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """AROUND ``move_kv_cache``: slots ``src_loc`` are copied to ``tgt_loc``."""
        if not self.moves_are_followed:
            return original(tgt_loc, src_loc, *args, **kwargs)
        monitor = self._monitor
        with monitor.engine_works():
            result = original(tgt_loc, src_loc, *args, **kwargs)
            with monitor.guard_errors("lifecycle"):
                for guard in monitor.guards:
                    guard.events.move(_own(guard, src_loc), _own(guard, tgt_loc))
        return result

    def around_get(
        self, original: Callable[..., Any], indices: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """AROUND ``get_cpu_copy``: the bytes of slots ``indices`` leave for the host."""
        copy = original(indices, *args, **kwargs)
        with_records = _WITH_RECORDS.get(type(copy))
        if with_records is None:
            return copy
        result = with_records(copy)
        result.carried = ()
        if self._monitor.blind_because is None:
            with self._monitor.guard_errors("lifecycle"):
                result.carried = tuple(
                    self._monitor.export_slots(guard.index, _own(guard, indices))
                    for guard in self._monitor.guards
                )
        return result

    def around_load(
        self,
        original: Callable[..., Any],
        copy: Any,
        indices: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """AROUND ``load_cpu_copy``: what left comes back, into slots ``indices``."""
        monitor = self._monitor
        if monitor.blind_because is not None:
            return original(copy, indices, *args, **kwargs)
        with monitor.engine_works():
            result = original(copy, indices, *args, **kwargs)
            with monitor.guard_errors("lifecycle"):
                if not hasattr(copy, "carried"):
                    raise UnknownCopyError(
                        f"load_cpu_copy got a {type(copy).__name__} without records"
                    )
                for guard, carried in zip(monitor.guards, copy.carried, strict=True):
                    if carried is not None:
                        monitor.import_slots(guard.index, _own(guard, indices), carried)
        return result


def _own(guard: GroupGuard, slots: torch.Tensor) -> torch.Tensor:
    """``slots`` of the page table in the group's own numbering, a copy; 0 where not mapped."""
    lookup = guard.group.full_to_swa
    slots = slots.to(torch.int64, copy=True)
    return slots if lookup is None else lookup[slots].to(torch.int64)
