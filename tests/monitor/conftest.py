"""What GPU scenarios of the monitor share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(params=["default stream", "a stream of its own"])
def engine_stream(request: pytest.FixtureRequest) -> Iterator[None]:
    """Engines run on either; streams of their own wait for nothing on the default one."""
    if request.param == "default stream":
        yield
    else:
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            yield
            torch.cuda.synchronize()
