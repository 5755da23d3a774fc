"""Mode abort: workers see which requests were hit, the scheduler's process ends them.

The two are processes of their own, and nothing that vLLM sends from one to the other has room for
it. So a worker appends request ids to a file in the directory that the engine's processes share for
metrics, and the scheduler looks at the size of that file when a step has ended.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable
from typing import Any

from kvcanary_plugin.series_file import DIRECTORY_VARIABLE

logger = logging.getLogger(__name__)

_FILE_NAME = "requests-to-end"


def report(request_ids: Iterable[str]) -> None:
    """A worker: these requests read K/V that is corrupted."""
    path = _path()
    text = "".join(f"{request_id}\n" for request_id in request_ids)
    if path is not None and text:
        # One write to the end of the file: workers do not cut into each other's lines.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


class ReportedRequests:
    """The scheduler's side of the file."""

    def __init__(self) -> None:
        self._read = 0

    def take(self) -> list[str]:
        """Ids reported since the last call. One look at the file's size when there is nothing."""
        path = _path()
        if path is None:
            return []
        try:
            if os.stat(path).st_size == self._read:
                return []
        except FileNotFoundError:
            return []
        with open(path, "rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        return whole.decode().split()


def extend_scheduler() -> None:
    """Let the scheduler end the requests that its workers report. Once per process."""
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.update_from_output
    reported = ReportedRequests()

    @functools.wraps(original)
    def update_from_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = original(self, *args, **kwargs)
        try:
            for request_id in reported.take():
                _end(self, request_id, outputs)
        except Exception:  # of ours: the engine goes on, the violation was reported anyway
            logger.exception("kvcanary: requests with a corrupted KV cache were not ended")
        return outputs

    Scheduler.update_from_output = update_from_output


def _end(scheduler: Any, request_id: str, outputs: Any) -> None:
    """Finish one request with an error, and tell its client."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import RequestStatus

    request = scheduler.requests.get(request_id)
    if request is None or request.is_finished():
        return
    logger.error("kvcanary: ending request %r: its KV cache is corrupted", request_id)
    scheduler.finish_requests(request_id, RequestStatus.FINISHED_ERROR)
    of_client = outputs.setdefault(request.client_index, EngineCoreOutputs())
    # Not appended: what the message was made with may be shared.
    of_client.outputs = [
        *of_client.outputs,
        EngineCoreOutput(
            request_id=request_id,
            new_token_ids=[],
            finish_reason=request.get_finished_reason(),
        ),
    ]


def _path() -> str | None:
    directory = os.environ.get(DIRECTORY_VARIABLE)
    return os.path.join(directory, _FILE_NAME) if directory is not None else None
