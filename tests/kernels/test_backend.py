"""Which implementation launches run on, and what is said when the fast one is missing."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from kvcanary_plugin.kernels import (
    CompilerNotFoundError,
    backend,
    load_kernels,
    use_torch_reference,
)
from kvcanary_plugin.kernels.backend import kernels_for
from tests.kernels import scenes


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_loaded", {})


def no_compiler(*_: Any, **__: Any) -> Any:
    raise CompilerNotFoundError("kvcanary: no C++ compiler found.")


def test_cpu_without_a_compiler_runs_the_reference_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend, "load_module_for", no_compiler)
    with caplog.at_level(logging.WARNING):
        context = scenes.make_context()
        scenes.write_sequence(context, tokens=[5, 6], slots=[3, 4])
        scenes.write_sequence(context, tokens=[5, 6], slots=[5, 6])
        assert load_kernels("cpu") == "torch reference"
    assert context.slot_run_counter.item() == 4
    (record,) = caplog.records
    assert "no C++ compiler found" in record.message
    assert "torch reference" in record.message


def test_gpu_without_a_compiler_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "load_module_for", no_compiler)
    with pytest.raises(RuntimeError, match="no C\\+\\+ compiler found"):
        load_kernels("cuda:0")


def test_kernels_are_loaded_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = []

    def load(device: torch.device, **_: Any) -> str:
        loads.append(device)
        return "module"

    monkeypatch.setattr(backend, "load_module_for", load)
    assert load_kernels("cpu") == "cpu"
    assert load_kernels("cpu") == "cpu"
    assert kernels_for(scenes.CPU) == "module"
    assert loads == [scenes.CPU]


def test_settings_reach_the_loader(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(backend, "load_module_for", lambda _, **settings: seen.update(settings))
    load_kernels("cpu", build_cache=tmp_path / "cache", prebuilt=tmp_path / "prebuilt")
    assert seen == {"cache_dir": tmp_path / "cache", "prebuilt_dir": tmp_path / "prebuilt"}


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="device must be a CPU or CUDA device, got meta"):
        load_kernels("meta")


def test_reference_can_be_asked_for_and_ends_with_its_block() -> None:
    assert kernels_for(scenes.CPU) is not None
    with use_torch_reference():
        assert kernels_for(scenes.CPU) is None
        with use_torch_reference():
            assert kernels_for(torch.device("cuda:0")) is None
        assert kernels_for(scenes.CPU) is None
    assert kernels_for(scenes.CPU) is not None


def test_reference_ends_with_an_error_too() -> None:
    def fail() -> None:
        with use_torch_reference():
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert kernels_for(scenes.CPU) is not None
