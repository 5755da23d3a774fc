"""The workload itself, and the client against a server that answers by script."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvcanary_plugin.drill.server import CHUNKED_PREFILL_SIZE, CONTEXT_LENGTH, VOCABULARY_SIZE
from kvcanary_plugin.drill.traffic import (
    Abort,
    RequestError,
    TrafficSpec,
    conversation,
    fixed_prompts,
    generate,
    run_traffic,
)

SPEC = TrafficSpec(conversations=400, abort_share=0.2)
CONVERSATIONS = [conversation(SPEC, index) for index in range(SPEC.conversations)]
TURNS = [turn for turns in CONVERSATIONS for turn in turns]


@contextmanager
def scripted_server(answer: Callable[[str, dict], tuple[int, dict]]) -> Iterator[str]:
    """The url of a server that answers each POST with ``answer(path, payload)``."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, body = answer(self.path, payload)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def served(payload: dict, *, output: list[int] | None = None, finish: str = "length") -> dict:
    """A /generate answer: the output counts up from the last prompt token unless given."""
    prompt = payload["input_ids"]
    count = payload["sampling_params"]["max_new_tokens"]
    return {
        "output_ids": [prompt[-1] + n for n in range(count)] if output is None else output,
        "meta_info": {
            "prompt_tokens": len(prompt),
            "cached_tokens": 0,
            "finish_reason": {"type": finish},
        },
    }


def test_the_same_spec_is_the_same_workload_and_another_seed_is_another():
    assert [conversation(SPEC, index) for index in range(50)] == CONVERSATIONS[:50]
    assert [conversation(replace(SPEC, seed=1), index) for index in range(50)] != CONVERSATIONS[:50]


def test_the_default_workload_has_every_shape_it_promises():
    first_turns = [turns[0].new_tokens for turns in CONVERSATIONS]
    beginnings = Counter(prompt[:12] for prompt in first_turns)
    assert sum(count > 50 for count in beginnings.values()) == SPEC.system_prompts
    assert sum(count == 1 for count in beginnings.values()) > 50
    assert any(len(turn.new_tokens) > 2 * CHUNKED_PREFILL_SIZE for turn in TURNS)
    assert any(len(turn.new_tokens) == 1 for turn in TURNS)
    assert {len(turns) for turns in CONVERSATIONS} == set(range(1, SPEC.most_turns + 1))
    assert {turn.abort for turn in TURNS} == {None, *Abort}
    assert any(turn.abort and turn.abort_after == 0 for turn in TURNS)


def test_every_request_fits_the_model():
    assert all(0 < token < VOCABULARY_SIZE for turn in TURNS for token in turn.new_tokens)
    greedy = replace(SPEC, long_prompt_share=1.0, multi_turn_share=1.0, most_turns=30)
    for index in range(20):
        turns = conversation(greedy, index)
        assert sum(len(turn.new_tokens) + turn.max_new_tokens for turn in turns) < CONTEXT_LENGTH


def test_fixed_prompts_share_beginnings():
    prompts = fixed_prompts(16)

    assert prompts == fixed_prompts(16)
    assert len(set(prompts)) == 16
    assert len({prompt[:12] for prompt in prompts}) < 10


def test_a_turn_goes_on_from_the_output_of_the_turn_before():
    prompts: dict[str, list[int]] = {}

    def answer(path, payload):
        prompts[payload["rid"]] = payload["input_ids"]
        return 200, served(payload)

    spec = TrafficSpec(conversations=8, abort_share=0.0, multi_turn_share=1.0)
    with scripted_server(answer) as url:
        result = run_traffic(url, spec)

    assert result.failures == ()
    assert result.requests == len(prompts) == len(result.outputs) > 8
    for index in range(8):
        turns = conversation(spec, index)
        context: list[int] = []
        for number, turn in enumerate(turns):
            context += turn.new_tokens
            assert prompts[f"traffic-0-{index}-{number}"] == context
            context += result.outputs[index, number]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda path, payload: (500, {"error": "boom"}), "status 500.*boom"),
        (lambda path, payload: (200, served(payload, output=[1])), "asked for 5 tokens"),
        (lambda path, payload: (200, served(payload, finish="abort")), "asked for 5 tokens"),
    ],
    ids=["error status", "short output", "aborted by the server"],
)
def test_an_answer_that_is_not_what_was_asked_for_is_an_error(answer, reason):
    with scripted_server(answer) as url, pytest.raises(RequestError, match=reason):
        generate(url, [3, 4], max_new_tokens=5)


def test_every_failed_request_is_listed_and_ends_its_conversation():
    spec = TrafficSpec(conversations=10, abort_share=0.0, multi_turn_share=1.0)
    with scripted_server(lambda path, payload: (503, {})) as url:
        result = run_traffic(url, spec)

    assert sorted(failure.split(":")[0] for failure in result.failures) == sorted(
        f"traffic-0-{index}-0" for index in range(10)
    )
    assert (result.requests, result.outputs) == (0, {})


def test_an_error_inside_an_aborted_stream_is_a_failure():
    spec = TrafficSpec(conversations=6, abort_share=1.0)

    def answer(path, payload):
        return 200, {} if path == "/abort_request" else {"error": {"message": "boom"}}

    with scripted_server(answer) as url:
        result = run_traffic(url, spec)

    # A client that hangs up before the first event cannot know of an error.
    hung_up_at_once = sum(
        turns[0].abort is Abort.DISCONNECT and turns[0].abort_after == 0
        for turns in (conversation(spec, index) for index in range(6))
    )
    assert len(result.failures) == 6 - hung_up_at_once > 0
    assert result.aborted == hung_up_at_once


def test_stop_ends_the_run_early():
    stop = threading.Event()

    def answer(path, payload):
        stop.set()
        return 200, served(payload)

    spec = TrafficSpec(conversations=200, concurrency=1, abort_share=0.0)
    with scripted_server(answer) as url:
        result = run_traffic(url, spec, stop=stop)

    assert (result.requests, result.failures) == (1, ())
