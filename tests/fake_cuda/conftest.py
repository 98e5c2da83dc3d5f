"""These tests run over a fake CUDA runtime: `make test-fake-gpu` (run.sh)."""

import pytest
import torch

from tests.fake_cuda import counters


def pytest_collection_modifyitems(items):
    if not counters.is_loaded():
        for item in items:
            if "fake_cuda" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason="needs the fake CUDA runtime: make test-fake-gpu"))


@pytest.fixture(autouse=True)
def on_first_device():
    """Tests of other devices leave this thread where it was; nothing illegal may have been tried."""
    before = [counters.read(device)["illegal"] for device in range(counters.NUM_DEVICES)]
    yield
    torch.cuda.set_device(0)
    assert [counters.read(device)["illegal"] for device in range(counters.NUM_DEVICES)] == before
