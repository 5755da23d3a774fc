"""A recorded forward as the engine would hand it to its monitor."""

from __future__ import annotations

import numpy as np

from kvcanary_plugin.forward import ForwardKind, ForwardStep, HostTokens
from kvcanary_plugin.incident_file import Forward, Part
from kvcanary_plugin.kernels.consts import PADDING_SLOT
from kvcanary_plugin.replay.numbering import int64
from kvcanary_plugin.replay.small_engine import SmallEngine


def put_rows_of(engine: SmallEngine, part: Part) -> None:
    """Page-table entries of the slots that the part writes, as the engine has made them."""
    row = engine.rows.here(part.uid, part.request_row)
    is_reader = engine.case.is_reader(part)
    for name, group in engine.groups.items():
        numbering = group.pool.numbering
        if not is_reader:
            # Of another request nothing is checked; only what its chain continues matters.
            group.table.set_entry(row, 0, max(0, numbering.dense(part.seeds[name])))
            continue
        for position, slot in enumerate(part.slots[name], start=part.prefix_len + part.first):
            if slot > PADDING_SLOT:
                for each in engine.rows.of(part.uid):
                    group.table.set_entry(each, position, numbering.dense(slot))


def step_of(engine: SmallEngine, forward: Forward) -> ForwardStep:
    parts, tokens, rows = forward.parts, engine.tokens, engine.rows
    prefix, host_prefix, extend = [], [], []
    for part in parts:
        before = part.prefix_len + part.first
        host_prefix.append(before)
        extend.append(len(part.tokens))
        if engine.case.is_reader(part):
            prefix.append(min(before, engine.case.end_of_reader))
        else:
            prefix.append(int(before > 0 and max(part.seeds.values()) > PADDING_SLOT))
    keys = [part.identity_key for part in parts]
    return ForwardStep(
        kind=ForwardKind(forward.kind),
        step=forward.step,
        request_rows=int64(rows.here(part.uid, part.request_row) for part in parts),
        request_uids=int64(part.uid for part in parts),
        prefix_lens=int64(prefix),
        extend_lens=int64(extend),
        max_prefix_len=max(prefix, default=0),
        input_ids=int64(tokens.here(token) for part in parts for token in part.tokens),
        positions=int64(position for part in parts for position in part.positions),
        out_cache_loc=tuple(
            int64(group.pool.numbering.dense(slot) for part in parts for slot in part.slots[name])
            for name, group in engine.groups.items()
        ),
        identity_keys=int64(keys) if any(keys) else None,
        host_prefix_lens=np.array(host_prefix, dtype=np.int64),
        host_extend_lens=np.array(extend, dtype=np.int64),
        host_tokens=tuple(
            prompt
            for row, part in enumerate(parts)
            if (prompt := _prompt(engine, row, part, prefix[row])) is not None
        ),
    )


def _prompt(engine: SmallEngine, batch_row: int, part: Part, prefix: int) -> HostTokens | None:
    if part.prompt is None or not engine.case.is_reader(part):
        return None
    tokens = [0] * part.prompt.first + [engine.tokens.here(t) for t in part.prompt.tokens]
    if len(tokens) > engine.width:
        del tokens[engine.width :]
    return HostTokens(
        batch_row=batch_row,
        request_row=engine.rows.here(part.uid, part.request_row),
        request_uid=part.uid,
        prefix_len=min(prefix, len(tokens)),
        num_tokens=len(tokens),
        source=np.array(tokens, dtype=np.int64),
        identity_key=part.identity_key,
    )
