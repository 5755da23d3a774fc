"""The half of a Triton backend that would compile."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import BaseBackend


class CPUBackend(BaseBackend):
    """Answers questions about itself; refuses to compile."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        return "cpu: interpreter only"

    def parse_options(self, options: Any) -> Any:
        return options

    def add_stages(self, stages: Any, options: Any, language: Any) -> None:
        raise RuntimeError("no compiler for CPUs here; set TRITON_INTERPRET=1")

    def load_dialects(self, context: Any) -> None:
        """There are none."""

    def get_module_map(self) -> dict[str, Any]:
        return {}
