"""Entry point ``vllm.general_plugins``: called in every process of a vLLM server.

vLLM calls it before it parses its command line, in engine cores and in workers; a forked process
inherits what its parent has patched and is not called again. It is also the way to give
``vllm.LLM`` its ``kvcanary_config=``: call ``register()`` before you construct one.

vLLM does not catch what a plugin raises. A version that lacks something of what is patched must
serve all the same while nobody has asked for a guard, and may not look guarded once somebody has.
"""

from __future__ import annotations

import functools
import logging
import os

from kvcanary_plugin.hooks.vllm import flag
from kvcanary_plugin.series_file import DIRECTORY_VARIABLE

logger = logging.getLogger(__name__)

# What a class or module that is not there raises.
_LACKING = (ImportError, AttributeError)


@functools.cache
def register() -> None:
    """Patch the argument classes and the worker wrapper; calling it again is harmless."""
    from kvcanary_plugin.hooks.vllm import aborts, attach, transfers

    _log_where_the_engine_logs()
    unsupported_because = None
    try:
        aborts.extend_scheduler()
        attach.extend_scheduler_output()
        transfers.extend_scheduler_connector()
    except _LACKING as error:
        unsupported_because = f"this vLLM lacks what the hooks need: {error}"
    try:
        attach.extend_worker(unsupported_because)
        flag.extend_engine_arguments()
    except _LACKING as error:
        # Nothing could show that it is not guarded, so there is no flag: vLLM refuses an unknown.
        logger.error("kvcanary: this vLLM cannot be guarded: %s", error)
        return
    if DIRECTORY_VARIABLE in os.environ:  # a second API server: the engine is configured already
        flag.show_workers_metrics()


def _log_where_the_engine_logs() -> None:
    """vLLM sets up the loggers of its own name only, and others belong to nobody: lines below
    WARNING would be lost, and the rest would show neither time nor process."""
    own = logging.getLogger("kvcanary_plugin")
    if not own.hasHandlers():
        own.parent = logging.getLogger("vllm")
