"""Finished layers reach their transfer in order, and before the commit."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
import torch

from kvrelay.prefill.worker import Announcements, DeviceGate


@pytest.fixture
def device(monkeypatch):
    """An event of the GPU that comes when the test sets it."""
    reached = threading.Event()
    event = SimpleNamespace(record=lambda: None, synchronize=reached.wait)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    return reached


def transfer(announced, *, is_on_gpu=False):
    return SimpleNamespace(request_id="r", is_on_gpu=is_on_gpu, announce=lambda *args: announced.append(args))


async def test_layers_of_a_request_with_a_transfer_are_announced_on_the_loop():
    announcements, announced = Announcements(), []
    announcements.add(transfer(announced))
    await asyncio.to_thread(announcements.on_layers, "r", 0, [3], range(2))
    await asyncio.to_thread(announcements.on_layers, "another", 0, [4], range(2))
    announcements.remove("r")
    await asyncio.to_thread(announcements.on_layers, "r", 0, [5], range(2, 4))
    await announcements.flushed()
    await asyncio.sleep(0)
    assert announced == [(0, [3], range(2))]


def test_a_callback_waits_for_the_device_and_for_the_callbacks_before_it(device):
    gate, order, done = DeviceGate(), [], threading.Event()
    gate.after_work_so_far(lambda: order.append("announce"))
    gate.after_callbacks_so_far(lambda: (order.append("commit"), done.set()))
    assert order == []
    device.set()
    assert done.wait(5)
    gate.close()
    assert order == ["announce", "commit"]


async def test_flushed_waits_for_announcements_that_wait_for_the_device(device):
    announcements, announced = Announcements(), []
    announcements.add(transfer(announced, is_on_gpu=True))
    announcements.on_layers("r", 0, [3], range(2))
    flushed = asyncio.create_task(announcements.flushed())
    await asyncio.sleep(0)
    assert announced == [] and not flushed.done()
    device.set()
    await flushed
    assert announced == [(0, [3], range(2))]
    announcements.aclose()
