"""Host memory that the GPU copies from: locked while its slab lives, unlocked with it. Over a made-up driver."""

import contextlib
import ctypes
import gc
import types

import pytest
import torch

from kvrelay.kvcache.memory import host

ALREADY_LOCKED = 712


class Driver:
    """Refuses what is locked already, as CUDA's does."""

    def __init__(self):
        self.locked = {}

    def cuMemHostRegister_v2(self, address, size, flags):
        return ALREADY_LOCKED if address.value in self.locked else self.locked.update({address.value: size.value}) or 0

    def cuMemHostUnregister(self, address):
        return 0 if self.locked.pop(address.value, None) else 713


@pytest.fixture
def driver(monkeypatch):
    found = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: found)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    return found


class Owner(types.SimpleNamespace):
    pass


def test_memory_is_unlocked_with_its_owner_so_that_its_addresses_can_be_locked_again(driver, caplog):
    owner = Owner()
    host.page_lock(owner, 4096, 8192, torch.device("cuda", 0))
    assert driver.locked == {4096: 8192}
    del owner
    gc.collect()
    assert driver.locked == {}
    host.page_lock(Owner(), 4096, 8192, torch.device("cuda", 0))
    assert not caplog.text


def test_memory_that_cannot_be_locked_is_used_as_it_is_and_stays_as_it_was(driver, caplog):
    first, second = Owner(), Owner()
    host.page_lock(first, 4096, 8192, torch.device("cuda", 0))
    host.page_lock(second, 4096, 8192, torch.device("cuda", 0))
    assert f"CUDA error {ALREADY_LOCKED}" in caplog.text
    del second
    gc.collect()
    assert driver.locked == {4096: 8192}
