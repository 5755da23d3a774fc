"""Seeded traffic of token-id prompts: what a client of the server sends, and what it got back.

A workload is a list of conversations, each made from its own seed, so that the same spec is the
same workload whatever the timing. Requests decode greedily and have a fixed length, so that equal
prompts give equal outputs.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from http.client import HTTPException
from itertools import islice
from typing import Any, Final

from kvcanary_plugin.drill import http_client
from kvcanary_plugin.drill.dialect import SGLANG, Completion, Dialect, Tokens
from kvcanary_plugin.drill.server import CONTEXT_LENGTH, VOCABULARY_SIZE

REQUEST_TIMEOUT_SECONDS: Final = 120.0
_FIRST_PLAIN_TOKEN: Final = 3  # below: padding, begin and end of sequence


class Abort(StrEnum):
    """How a client gives up a request while it runs."""

    DISCONNECT = "disconnect"
    ABORT_REQUEST = "abort_request"


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One request of a conversation.

    Fields:
        new_tokens: appended to the prompt and output of the turn before.
        max_new_tokens: length of the output.
        abort: how the client gives up, if it does.
        abort_after: output events to wait for before it does.
    """

    new_tokens: Tokens
    max_new_tokens: int
    abort: Abort | None = None
    abort_after: int = 0


@dataclass(frozen=True, kw_only=True)
class TrafficSpec:
    """A reproducible workload. Lengths are (smallest, largest) in tokens, shares are 0 .. 1.

    Fields:
        conversations: how many.
        seed: everything random follows from it.
        concurrency: client threads.
        burst: conversations handed to the threads at once; the next burst waits for their end.
        system_prompts: how many shared beginnings there are; as many conversations as have each
            of them have none.
        system_prompt_tokens: their lengths.
        prompt_tokens: length of the new tokens of a turn.
        long_prompt_share: share of turns that take ``long_prompt_tokens`` instead. Beyond the
            server's chunk size a prefill runs in several forwards.
        long_prompt_tokens: length of those.
        output_tokens: length of an output.
        multi_turn_share: share of conversations with 2 .. ``most_turns`` turns.
        most_turns: see above.
        abort_share: share of turns that are given up in the middle; they end their conversation.
    """

    conversations: int = 48
    seed: int = 0
    concurrency: int = 8
    burst: int = 24
    system_prompts: int = 3
    system_prompt_tokens: tuple[int, int] = (12, 96)
    prompt_tokens: tuple[int, int] = (1, 48)
    long_prompt_share: float = 0.15
    long_prompt_tokens: tuple[int, int] = (80, 240)
    output_tokens: tuple[int, int] = (1, 32)
    multi_turn_share: float = 0.3
    most_turns: int = 4
    abort_share: float = 0.1


class RequestError(RuntimeError):
    """The server did not serve a request as asked."""


@dataclass(frozen=True, kw_only=True)
class TrafficResult:
    """What a workload came to.

    Fields:
        requests: requests served to their end.
        aborted: requests that the client gave up.
        tokens: output tokens of the requests served to their end.
        prompt_tokens: prompt tokens of the same requests.
        cached_tokens: how many of those came out of the prefix cache.
        seconds: wall time.
        failures: one line per request that failed; empty when all is well.
        outputs: (conversation, turn) to output tokens, for requests served to their end.
    """

    requests: int
    aborted: int
    tokens: int
    prompt_tokens: int
    cached_tokens: int
    seconds: float
    failures: tuple[str, ...]
    outputs: dict[tuple[int, int], Tokens]

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second."""
        return self.tokens / self.seconds


def run_traffic(
    url: str,
    spec: TrafficSpec,
    *,
    stop: threading.Event | None = None,
    dialect: Dialect = SGLANG,
) -> TrafficResult:
    """Run the workload against the server at ``url`` and wait for its end.

    A request that fails ends its conversation and is listed in the result; nothing is raised.
    Setting ``stop`` ends the run early: requests under way are served to their end.
    """
    tally = _Tally()
    stop = stop or threading.Event()

    def converse(index: int) -> None:
        _run_conversation(url, dialect, spec, index, tally, stop)

    begin = time.monotonic()
    with ThreadPoolExecutor(spec.concurrency, thread_name_prefix="kvcanary-traffic") as pool:
        for burst in _in_parts(range(spec.conversations), spec.burst):
            # The list asks every future for its result: what a thread raises is raised here.
            list(pool.map(converse, burst))
    return tally.result(seconds=time.monotonic() - begin)


def generate(
    url: str,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    request_id: str | None = None,
    dialect: Dialect = SGLANG,
) -> Completion:
    """Serve one request. Raises RequestError when the server does not serve it to its end."""
    payload = dialect.payload(prompt, max_new_tokens, request_id)
    try:
        status, text = http_client.post(
            url, dialect.generate_path, payload, timeout=REQUEST_TIMEOUT_SECONDS
        )
    except (OSError, HTTPException) as error:
        raise RequestError(f"no answer: {error!r}") from error
    if status != 200:
        raise RequestError(f"status {status}: {text[:500]}")
    completion = dialect.completion(json.loads(text))
    if completion.aborted or len(completion.output) != max_new_tokens:
        raise RequestError(f"asked for {max_new_tokens} tokens, got {text[:500]}")
    return completion


def generate_all(
    url: str,
    prompts: Iterable[Sequence[int]],
    *,
    max_new_tokens: int,
    concurrency: int = 1,
    dialect: Dialect = SGLANG,
) -> list[Tokens]:
    """Greedy outputs of ``prompts``, in their order. Raises RequestError as :func:`generate`."""

    def output_of(prompt: Sequence[int]) -> Tokens:
        return generate(url, prompt, max_new_tokens=max_new_tokens, dialect=dialect).output

    with ThreadPoolExecutor(concurrency, thread_name_prefix="kvcanary-generate") as pool:
        return list(pool.map(output_of, prompts))


def fixed_prompts(count: int = 16, *, seed: int = 0) -> list[Tokens]:
    """Prompts for comparing two servers: mixed lengths, most with a shared beginning."""
    spec = TrafficSpec(seed=seed)
    return [conversation(spec, index)[0].new_tokens for index in range(count)]


def conversation(spec: TrafficSpec, index: int) -> list[Turn]:
    """The turns of conversation ``index``: a function of the spec and the index alone."""
    rng = random.Random(f"{spec.seed}:{index}")
    turn_count = rng.randint(2, spec.most_turns) if rng.random() < spec.multi_turn_share else 1
    context = 0
    turns: list[Turn] = []
    for number in range(turn_count):
        new_tokens: Tokens = ()
        if number == 0 and (system_prompt := rng.randint(0, spec.system_prompts)) > 0:
            new_tokens = _system_prompt(spec, system_prompt)
        is_long = rng.random() < spec.long_prompt_share
        lengths = spec.long_prompt_tokens if is_long else spec.prompt_tokens
        new_tokens += _tokens(rng, rng.randint(*lengths))
        max_new_tokens = rng.randint(*spec.output_tokens)
        context += len(new_tokens) + max_new_tokens
        if context >= CONTEXT_LENGTH:
            break
        abort = rng.choice(list(Abort)) if rng.random() < spec.abort_share else None
        abort_after = rng.randint(0, max_new_tokens // 2)
        turns.append(
            Turn(
                new_tokens=new_tokens,
                max_new_tokens=max_new_tokens,
                abort=abort,
                abort_after=abort_after,
            )
        )
        if abort is not None:
            break
    return turns


def request_id(spec: TrafficSpec, index: int, turn: int) -> str:
    """The request id under which turn ``turn`` of conversation ``index`` is sent."""
    return f"traffic-{spec.seed}-{index}-{turn}"


@dataclass
class _Tally:
    """Collects what the client threads report."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    completions: dict[tuple[int, int], Completion] = field(default_factory=dict)
    aborted: int = 0
    failures: list[str] = field(default_factory=list)

    def add_completion(self, index: int, turn: int, completion: Completion) -> None:
        with self.lock:
            self.completions[index, turn] = completion

    def add_abort(self) -> None:
        with self.lock:
            self.aborted += 1

    def add_failure(self, name: str, error: Exception) -> None:
        with self.lock:
            self.failures.append(f"{name}: {error}")

    def result(self, *, seconds: float) -> TrafficResult:
        served = self.completions.values()
        return TrafficResult(
            requests=len(served),
            aborted=self.aborted,
            tokens=sum(len(completion.output) for completion in served),
            prompt_tokens=sum(completion.prompt_tokens for completion in served),
            cached_tokens=sum(completion.cached_tokens for completion in served),
            seconds=seconds,
            failures=tuple(self.failures),
            outputs={key: self.completions[key].output for key in sorted(self.completions)},
        )


def _run_conversation(
    url: str,
    dialect: Dialect,
    spec: TrafficSpec,
    index: int,
    tally: _Tally,
    stop: threading.Event,
) -> None:
    context: Tokens = ()
    for number, turn in enumerate(conversation(spec, index)):
        if stop.is_set():
            return
        name = request_id(spec, index, number)
        context += turn.new_tokens
        try:
            if turn.abort is not None:
                _generate_and_abort(url, dialect, context, turn, request_id=name)
                tally.add_abort()
                return
            completion = generate(
                url,
                context,
                max_new_tokens=turn.max_new_tokens,
                request_id=name,
                dialect=dialect,
            )
        except RequestError as error:
            tally.add_failure(name, error)
            return
        tally.add_completion(index, number, completion)
        context += completion.output


def _generate_and_abort(
    url: str, dialect: Dialect, prompt: Tokens, turn: Turn, *, request_id: str
) -> None:
    """Start a streaming request, wait for ``turn.abort_after`` events, and give it up."""
    payload = dialect.payload(prompt, turn.max_new_tokens, request_id)
    payload["stream"] = True
    hangs_up = turn.abort is Abort.DISCONNECT or dialect.abort is None
    try:
        with http_client.open_request(
            url, dialect.generate_path, payload, timeout=REQUEST_TIMEOUT_SECONDS
        ) as connection:
            if turn.abort_after == 0 and not hangs_up:
                # Before the first token: the request may still wait in the server's queue.
                _abort_request(url, dialect, request_id)
            response = connection.getresponse()
            if response.status != 200:
                raise RequestError(f"status {response.status}: {response.read(500)!r}")
            events = http_client.stream_events(response)
            _read_events(islice(events, turn.abort_after))
            if hangs_up:
                return  # leaving the block hangs up
            if turn.abort_after > 0:
                _abort_request(url, dialect, request_id)
            _read_events(events)  # the server ends the stream
    except (OSError, HTTPException) as error:
        raise RequestError(f"no answer: {error!r}") from error


def _read_events(events: Iterable[dict[str, Any]]) -> None:
    for event in events:
        if "error" in event:
            raise RequestError(f"error in the stream: {event['error']}")


def _abort_request(url: str, dialect: Dialect, request_id: str) -> None:
    assert dialect.abort is not None
    path, payload = dialect.abort(request_id)
    status, text = http_client.post(url, path, payload, timeout=REQUEST_TIMEOUT_SECONDS)
    if status != 200:
        raise RequestError(f"{path}: status {status}: {text[:500]}")


def _system_prompt(spec: TrafficSpec, number: int) -> Tokens:
    rng = random.Random(f"{spec.seed}:system prompt:{number}")
    return _tokens(rng, rng.randint(*spec.system_prompt_tokens))


def _tokens(rng: random.Random, count: int) -> Tokens:
    return tuple(rng.randrange(_FIRST_PLAIN_TOKEN, VOCABULARY_SIZE) for _ in range(count))


def _in_parts(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
