"""What is wrong with a configuration, as data and as text for the operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigProblem:
    """One thing that is wrong.

    Fields:
        field: dotted name of the setting, "" for the file as a whole.
        value: what was given, as text.
        allowed: what the setting accepts.
        do: what the operator should change.
        where: "FILE, line N" or the name of the environment variable; "" when built in code.
    """

    field: str
    value: str
    allowed: str
    do: str
    where: str = ""

    def __str__(self) -> str:
        subject = f"{self.field} got {self.value}" if self.field else self.value
        place = f"{self.where}: " if self.where else ""
        return f"{place}{subject}; allowed: {self.allowed}; {self.do}"


class ConfigError(ValueError):
    """A configuration that cannot be used; the text lists every problem found.

    Attributes:
        problems: the problems, in the order in which they were found; at least one.
    """

    def __init__(self, problems: Sequence[ConfigProblem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        title = "1 problem" if count == 1 else f"{count} problems"
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(f"kvcanary: the configuration has {title}:\n{lines}")
