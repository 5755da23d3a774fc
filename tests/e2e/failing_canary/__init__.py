"""A canary that fails inside of itself, for the tests.

Loaded inside the server as SGLANG_EXTERNAL_MODEL_PACKAGE: while the file FAIL_CANARY exists, no
batch can be translated.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvcanary_plugin.hooks.sglang.batch import BatchTranslator

_FAIL = Path(os.environ["FAIL_CANARY"])
_translate = BatchTranslator.translate


def translate(self: BatchTranslator, forward_batch: Any) -> Any:
    if _FAIL.exists():
        raise RuntimeError("no batch is translated")
    return _translate(self, forward_batch)


BatchTranslator.translate = translate
