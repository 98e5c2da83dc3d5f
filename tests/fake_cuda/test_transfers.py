"""What a KV transfer's checksums cost on a GPU: nothing on the engine's stream."""

import numpy as np
import pytest
import torch

from kvrelay.kvtransfer.mover import device_checksums
from tests.fake_cuda.counters import counted

PIECES = np.arange(128, dtype=np.int64)[:, None] * 65536  # of one announcement: 128 regions of 64 KiB


@pytest.fixture(params=[True, False], ids=["triton", "torch"], autouse=True)
def has_triton(request, monkeypatch):
    """The comparison at start would fail: no kernel computes anything here."""
    monkeypatch.setattr(device_checksums, "has_triton", lambda device: request.param)
    return request.param


def test_checksums_run_on_a_stream_of_their_own(has_triton):
    pool = torch.zeros(32 << 20, dtype=torch.uint8, device="cuda:0")
    device_checksums.device_checksums(pool, PIECES, 65536)  # builds kernels
    with counted() as counts:
        device_checksums.device_checksums(pool, PIECES, 65536)
    assert "kernels" not in counts and counts["event_waits"] == 1
    assert counts["side_kernels"] == (1 if has_triton else counts["side_kernels"]) > 0
    stalls = {"device_waits", "stream_waits", "sync_copies", "pageable_to_device", "pageable_to_host"}
    assert not stalls & counts.keys()


def test_the_counters_see_sums_on_the_engines_stream(monkeypatch):
    """The control."""
    monkeypatch.setattr(device_checksums, "_stream", torch.cuda.default_stream)
    pool = torch.zeros(32 << 20, dtype=torch.uint8, device="cuda:0")
    with counted() as counts:
        device_checksums.device_checksums(pool, PIECES, 65536)
    assert counts["kernels"] > 0


def test_a_pool_on_the_second_device_is_summed_there():
    pool = torch.zeros(32 << 20, dtype=torch.uint8, device="cuda:1")
    with counted(0) as first, counted(1) as second:
        device_checksums.device_checksums(pool, PIECES, 65536)
    assert second["side_kernels"] > 0 and not {"kernels", "side_kernels", "events"} & first.keys()
