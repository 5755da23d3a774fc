"""Entry point ``vllm.general_plugins``: called in every process of a vLLM server.

vLLM calls it before it parses its command line, in engine cores and in workers; a forked process
inherits what its parent has patched and is not called again. It is also the way to give
``vllm.LLM`` its ``kvcanary_config=``: call ``register()`` before you construct one.
"""

from __future__ import annotations

import functools
import logging
import os

from kvcanary_plugin.hooks.vllm import flag
from kvcanary_plugin.series_file import DIRECTORY_VARIABLE


@functools.cache
def register() -> None:
    """Patch the argument classes and the worker wrapper; calling it again is harmless."""
    from kvcanary_plugin.hooks.vllm import aborts, attach, transfers

    _log_where_the_engine_logs()
    flag.extend_engine_arguments()
    aborts.extend_scheduler()
    attach.extend_scheduler_output()
    transfers.extend_scheduler_connector()
    attach.extend_worker()
    if DIRECTORY_VARIABLE in os.environ:  # a second API server: the engine is configured already
        flag.show_workers_metrics()


def _log_where_the_engine_logs() -> None:
    """vLLM sets up the loggers of its own name only, and others belong to nobody: lines below
    WARNING would be lost, and the rest would show neither time nor process."""
    own = logging.getLogger("kvcanary_plugin")
    if not own.hasHandlers():
        own.parent = logging.getLogger("vllm")
