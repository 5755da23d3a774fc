"""Entry point ``sglang.srt.plugins``: called once in every process of an SGLang server.

SGLang logs an exception of a plugin and serves on without it, and it only logs a hook whose target
does not exist. Neither may happen to a canary unseen, so this module checks both and ends the
process (``SystemExit`` passes through) where the operator asked for a guard that cannot be had.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from kvcanary_plugin.hooks.sglang import flag, versions

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the flag in the main process and the forward hooks in scheduler processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(versions.ADD_CLI_ARGS, flag.after_add_cli_args, HookType.AFTER)
    HookRegistry.register(versions.FROM_CLI_ARGS, flag.around_from_cli_args, HookType.AROUND)
    # Modules that this process has not loaded are not loaded for the canary's sake: the detokenizer
    # never builds an Engine and never runs a forward.
    if "sglang.srt.entrypoints.engine" in sys.modules:
        flag.extend_engine_arguments()
    if "sglang.srt.managers.scheduler" in sys.modules:
        HookRegistry.register(
            versions.CONFIGURE_SCHEDULER, _after_configure_scheduler, HookType.AFTER
        )


def _after_configure_scheduler(_result: Any, *_args: Any, **_kwargs: Any) -> None:
    """In a scheduler process: put the canary around the model runner, if the operator asked."""
    config = flag.config_of_this_process()
    if config is None:
        logger.info(
            "kvcanary: installed but not enabled; give the server %s FILE to enable it", flag.FLAG
        )
        return

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from kvcanary_plugin.hooks.sglang import attach

    HookRegistry.register(versions.POOLS_READY, attach.after_pools_ready, HookType.AFTER)
    HookRegistry.register(versions.NEW_BATCH, attach.after_new_batch, HookType.AFTER)
    HookRegistry.register(versions.FORWARD, attach.around_forward, HookType.AROUND)
    HookRegistry.register(versions.SAMPLE, attach.after_sample, HookType.AFTER)
    HookRegistry.register(versions.RELEASE_MEMORY, attach.around_release_memory, HookType.AROUND)
    HookRegistry.register(
        versions.FLUSH_AFTER_UPDATE, attach.around_flush_after_update, HookType.AROUND
    )
    HookRegistry.apply_hooks()
    missing = [t for t in versions.SCHEDULER_TARGETS if t not in HookRegistry._patched]
    if missing:
        attach.refuse_or_show_unsupported(config, versions.lacks(*missing))
