"""Which kernels a canary makes ready before the engine serves."""

from __future__ import annotations

from pathlib import Path

import torch

from kvcanary_plugin import canary
from kvcanary_plugin.config import CanaryConfig
from kvcanary_plugin.config.model import Build


def test_the_hosts_kernels_are_ready_as_well_when_the_cache_is_on_a_gpu(monkeypatch):
    loaded = []

    def load(device, *, build_cache, prebuilt):
        loaded.append((str(device), build_cache, prebuilt))
        return str(device)

    monkeypatch.setattr(canary, "load_kernels", load)
    build = Build(cache_directory=Path("/cache"), prebuilt_directory=Path("/prebuilt"))

    backend = canary._load_kernels(CanaryConfig(build=build), torch.device("cuda"))

    assert backend == "cuda"
    assert loaded == [
        ("cpu", Path("/cache"), Path("/prebuilt")),
        ("cuda", Path("/cache"), Path("/prebuilt")),
    ]
