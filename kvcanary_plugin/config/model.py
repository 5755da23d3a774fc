"""The model of every setting: name, meaning, unit, bounds, default.

The defaults are the production setting. ``docs/configure.md`` is generated from this module by
``kvcanary config-docs``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from kvcanary_plugin.config.problems import ConfigProblem

Mode = Literal["off", "log", "abort", "raise"]
RealKv = Literal["none", "partial", "all"]

# Labels that the plugin's own metrics use, or that Prometheus adds by itself.
RESERVED_LABELS: Final = frozenset(
    {"engine", "tp_rank", "pp_rank", "dp_rank", "check", "group", "phase", "kind", "result"}
    | {"where", "state", "mode", "version", "backend"}
    | {"le", "quantile", "pid", "job", "instance"}
)
LABEL_NAME: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*\Z")

# Error type under which the model reports several ConfigProblems at once.
CONTRADICTION: Final = "kvcanary_contradiction"


def setting(
    default: Any, description: str, *, unit: str = "", reloadable: bool = False, **bounds: Any
) -> Any:
    """A field with what pydantic has no place for: its unit, and whether it may change later."""
    extra: dict[str, Any] = {"unit": unit, "reloadable": reloadable}
    return Field(default, description=description, json_schema_extra=extra, **bounds)


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Checks(Section):
    """Which checks may raise a violation. A check that is off is neither counted nor reported."""

    chain: bool = setting(
        True, "The hash chain of a slot's record follows from its predecessor's record."
    )
    position: bool = setting(
        True, "The position stored with a slot is the position at which it is read."
    )
    token: bool = setting(
        False,
        "The token stored with a slot is the one in the request's own history. Needs a token"
        " history on the device (4 bytes a token of context, for every request row of the engine),"
        " hence off in production.",
    )
    prefix_identity: bool = setting(
        True,
        "At admission, the chain hash of a cached prefix equals the one computed on the host from"
        " the request's own tokens and identity key.",
    )
    real_kv: bool = setting(True, "The bytes of K and V are still those that were sealed.")
    write_input: bool = setting(
        True,
        "Tokens and positions that enter a forward are the expected ones. Compared with the"
        " scheduler's own values only while `write_input_assert` is on; consecutive positions are"
        " checked always.",
    )
    unwritten: bool = setting(True, "No slot is read that nobody wrote.")
    freed_read: bool = setting(True, "No slot is read after it was freed.")
    out_of_pool: bool = setting(True, "No slot index lies outside the pool or the page table.")
    write_owned: bool = setting(True, "No slot is written while another live request owns it.")
    double_free: bool = setting(True, "No slot is freed twice.")
    double_alloc: bool = setting(True, "No slot is handed out while it is still in use.")
    table_changed: bool = setting(
        True, "The page-table rows that a forward reads do not change under it."
    )


CHECK_NAMES: Final = tuple(Checks.model_fields)


class Verify(Section):
    """The verify before each forward: every slot the batch is about to read."""

    real_kv: RealKv = setting(
        "none",
        "What the verify folds of each slot's real K and V: nothing (records and slot states"
        " only), the first 16 bytes of each layer, or every byte. Must be `none` or equal"
        " `seal.real_kv`.",
    )


class Seal(Section):
    """The seal after each forward: the slots just written."""

    real_kv: RealKv = setting(
        "all",
        "What is folded into the record of a new slot: nothing, the first 16 bytes of each layer"
        " (a change behind them is not seen), or every byte of every layer.",
    )


class Reverify(Section):
    """The second look after the forward: records and page-table rows are still what verify saw."""

    sample: float = setting(
        0.05,
        "Share of the forwards after which the slots and page-table rows they read are looked at"
        " again; 0 turns it off, 1 does it after every forward.",
        unit="fraction",
        reloadable=True,
        ge=0.0,
        le=1.0,
    )


class Scrub(Section):
    """The background scrub: every live slot in turn, all sealed bytes folded again and compared."""

    percent_of_step_time: float | None = setting(
        1.0,
        "Budget of the scrub as a share of the time of a step; 0 turns the scrub off. Give either"
        " this or `scrub.bytes_per_second`.",
        unit="percent",
        reloadable=True,
        ge=0.0,
        le=50.0,
    )
    bytes_per_second: int | None = setting(
        None,
        "Budget of the scrub as bytes of K/V read a second; 0 turns the scrub off.",
        unit="bytes per second",
        reloadable=True,
        ge=0,
        le=10**13,
    )

    @model_validator(mode="before")
    @classmethod
    def _bytes_replace_the_default_percent(cls, data: Any) -> Any:
        if (
            isinstance(data, Mapping)
            and data.get("bytes_per_second") is not None
            and "percent_of_step_time" not in data
        ):
            return {**data, "percent_of_step_time": None}
        return data

    @property
    def is_off(self) -> bool:
        """Whether the budget is zero."""
        return not self.percent_of_step_time and not self.bytes_per_second


class Ring(Section):
    """The ring of violation rows between the kernels and the drain thread."""

    capacity: int = setting(
        16384,
        "Rows (128 bytes each) the ring holds. What does not fit between two polls of the drain"
        " thread is counted in `kvcanary_ring_dropped_total`.",
        unit="rows",
        ge=64,
        le=1 << 20,
    )


class DrainSettings(Section):
    """The thread that turns ring rows into metrics and reports."""

    interval_seconds: float = setting(
        0.25,
        "Time between two polls of the ring and the counters.",
        unit="seconds",
        ge=0.005,
        le=60.0,
    )


class MetricsSettings(Section):
    """Prometheus metrics. They appear on the engine's own /metrics when that is on."""

    labels: dict[str, str] = setting(
        {}, "Constant labels added to every metric, name to value (for instance `pool: blue`)."
    )
    port: Annotated[int, Field(ge=1, le=65535)] | None = setting(
        None,
        "TCP port of an own /metrics endpoint, beside the engine's; rank r serves on port + r."
        " Not set: no own endpoint.",
    )
    address: str = setting(
        "127.0.0.1", "Address the own endpoint listens on.", min_length=1, pattern=r"^\S+$"
    )

    @field_validator("labels")
    @classmethod
    def _label_names_are_valid_and_free(cls, labels: dict[str, str]) -> dict[str, str]:
        for name in labels:
            if not LABEL_NAME.match(name) or name.startswith("__"):
                raise ValueError(
                    f"label name {name!r} is not one: letters, digits and _ only, no digit first,"
                    " no __ first"
                )
            if name in RESERVED_LABELS:
                raise ValueError(f"label name {name!r} is taken: choose another name")
        return labels


class Report(Section):
    """Report files: one JSON object a line."""

    directory: Path | None = setting(
        None, "Directory for report files; it is created. Not set: reports go to the log only."
    )
    max_bytes: int = setting(
        64 * 1024 * 1024,
        "Size that all report files in the directory may have together; the oldest are removed.",
        unit="bytes",
        ge=64 * 1024,
        le=1 << 40,
    )
    include_tokens: bool = setting(
        False, "Whether reports and log lines show token ids. Token ids are user content."
    )
    every_row: bool = setting(
        False, "Whether report files get every violation row, beside one report an incident."
    )


class LogSettings(Section):
    """The log."""

    max_reports_per_minute: int = setting(
        60,
        "Violation reports logged a minute; what is left out is counted in the next report.",
        unit="reports per minute",
        reloadable=True,
        ge=1,
        le=6000,
    )


class Recorder(Section):
    """The flight recorder: what the last forwards did, written out with an incident."""

    forwards: int = setting(
        64, "Forwards the recorder keeps; 0 turns it off.", unit="forwards", ge=0, le=4096
    )


class Build(Section):
    """Where compiled kernels come from."""

    cache_directory: Path | None = setting(
        None,
        "Directory in which compiled kernels are kept between starts. Not set: `kvcanary` below"
        " the user's cache directory.",
    )
    prebuilt_directory: Path | None = setting(
        None,
        "Directory filled ahead of time by `kvcanary build`; then no compiler is needed at run"
        " time.",
    )


class Faults(Section):
    """Fault injection, for drills. Never in production."""

    allowed: bool = setting(
        False, "Whether faults may be planted. They corrupt the output of running requests."
    )
    control_file: Path | None = setting(
        None,
        "File that the injector watches for the faults to plant. Needs `faults.allowed: true`.",
    )


class CanaryConfig(Section):
    """Every setting of the canary."""

    mode: Mode = setting(
        "log",
        "What a violation does. `off`: nothing is checked. `log`: counted and reported. `abort`:"
        " also ends the request that was hit. `raise`: also stops the engine at the next forward.",
        reloadable=True,
    )
    write_input_assert: bool = setting(
        False,
        "Whether the tokens and positions that enter a forward are compared with the scheduler's"
        " own values before they are written to the records. Needs the token history of"
        " `checks.token`; it is allocated when this is switched on.",
        reloadable=True,
    )
    allow_unguarded: tuple[str, ...] = setting(
        (),
        "Groups that may stay unguarded in mode `raise` (for instance `draft`). Without its name"
        " here, a part of the cache that shows as `unsupported` keeps the engine from starting in"
        " that mode. In a variable: names with commas between them.",
    )
    checks: Checks = Checks()
    verify: Verify = Verify()
    seal: Seal = Seal()
    reverify: Reverify = Reverify()
    scrub: Scrub = Scrub()
    ring: Ring = Ring()
    drain: DrainSettings = DrainSettings()
    metrics: MetricsSettings = MetricsSettings()
    report: Report = Report()
    log: LogSettings = LogSettings()
    recorder: Recorder = Recorder()
    build: Build = Build()
    faults: Faults = Faults()

    @field_validator("allow_unguarded", mode="before")
    @classmethod
    def _a_variable_has_commas(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return tuple(name.strip() for name in value.split(",") if name.strip())

    @field_validator("mode", mode="before")
    @classmethod
    def _yaml_reads_a_bare_off_as_false(cls, value: Any) -> Any:
        return "off" if value is False else value

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        problems = _contradictions(self)
        if problems:
            text = "; ".join(str(problem) for problem in problems)
            # The text is a template to pydantic: braces in it would be taken for placeholders.
            raise PydanticCustomError(CONTRADICTION, "{text}", {"text": text, "all": problems})
        return self


def _contradictions(config: CanaryConfig) -> list[ConfigProblem]:
    """Settings that are valid alone and wrong together."""
    problems = []

    def add(field: str, value: object, allowed: str, do: str) -> None:
        problems.append(ConfigProblem(field=field, value=str(value), allowed=allowed, do=do))

    scrub, seal, verify, checks = config.scrub, config.seal, config.verify, config.checks
    if scrub.percent_of_step_time is not None and scrub.bytes_per_second is not None:
        add(
            "scrub.bytes_per_second",
            f"{scrub.bytes_per_second} beside scrub.percent_of_step_time"
            f" {scrub.percent_of_step_time}",
            "one budget",
            "remove one of the two",
        )
    if scrub.percent_of_step_time is None and scrub.bytes_per_second is None:
        add(
            "scrub.percent_of_step_time",
            "null with scrub.bytes_per_second null",
            "one budget",
            "set one of the two; 0 turns the scrub off",
        )
    if verify.real_kv not in ("none", seal.real_kv):
        add(
            "verify.real_kv",
            verify.real_kv,
            " or ".join(dict.fromkeys(("none", seal.real_kv)))
            + f", as seal.real_kv is {seal.real_kv}",
            "give both the same value: a fold can only be compared with one over the same bytes",
        )
    if seal.real_kv == "none" and not scrub.is_off:
        add(
            "seal.real_kv",
            "none",
            "partial or all while the scrub is on",
            "seal real K/V, or set scrub.percent_of_step_time: 0: without a seal there is nothing"
            " to compare with",
        )
    if not checks.real_kv and (verify.real_kv != "none" or not scrub.is_off):
        add(
            "checks.real_kv",
            "false",
            "true, as verify.real_kv or the scrub would fold bytes for it",
            "set it to true, or set verify.real_kv: none and scrub.percent_of_step_time: 0",
        )
    if config.write_input_assert and not checks.write_input:
        add(
            "write_input_assert",
            "true",
            "false, as checks.write_input is false",
            "set checks.write_input: true, or write_input_assert: false",
        )
    if config.faults.control_file is not None and not config.faults.allowed:
        add(
            "faults.control_file",
            config.faults.control_file,
            "null, as faults.allowed is false",
            "remove it, or set faults.allowed: true on a server that serves nobody",
        )
    return problems
