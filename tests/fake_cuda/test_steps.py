"""What the steps of an engine cost on a GPU besides its kernels: waits, copies, launches, by kind of step."""

import gc

import pytest
import torch

from kvrelay.engine.execution import runner
from tests.fake_cuda import counters, engines
from tests.fake_cuda.step_kinds import KINDS, PAGEABLE, STALLS, Measurements


@pytest.fixture(scope="module")
def measurements(tmp_path_factory):
    found = Measurements(tmp_path_factory.mktemp("models"))
    yield found
    found.close()


@pytest.fixture(autouse=True)
def patched(monkeypatch):
    engines.patch(monkeypatch)


@pytest.fixture
def llama(measurements):
    engine = engines.make(measurements.folder("llama"))
    yield engine
    engine.close()


def stalls(counts):
    return {name: counts[name] for name in (*STALLS, *PAGEABLE) if name in counts}


@pytest.mark.parametrize("name", KINDS)
def test_a_step_waits_once_and_copies_no_pageable_memory(measurements, name):
    kind = KINDS[name]
    found = measurements.of(kind)
    num_layers = engines.CONFIGS[kind.model]["num_hidden_layers"]
    assert (found.waits, found.pageable_copies, found.captures) == (kind.waits, 0, 0)
    assert found.graphs == kind.graphs(num_layers) and found.kernels <= kind.kernels


def test_the_counters_see_a_step_that_waits(llama, monkeypatch):
    """The control: as rows of a step's hidden states were chosen before."""
    monkeypatch.setattr(runner, "to_device", lambda x, device: torch.tensor(x.tolist(), device=device))
    with engines.decoding(llama, 4) as step:
        engines.add_prompt(llama, 700)
        assert any(stalls(counts) for counts in engines.counts_of(step))


def test_all_work_is_on_the_engines_own_device(measurements):
    gc.collect()  # what earlier engines leave is freed now
    before = counters.read(0)
    engine = engines.make(measurements.folder("llama"), "cuda:1")
    with engines.decoding(engine, 4) as step:
        engines.add_prompt(engine, 700)
        counts = engines.counts_of(step, device=1)
    engine.close()
    assert all(found["kernels"] and not stalls(found) for found in counts)
    after = counters.read(0)
    busy = ("kernels", "side_kernels", "graph_launches", "events", "pinned_to_device", "pinned_to_host")
    assert {name: after[name] - before[name] for name in busy} == dict.fromkeys(busy, 0)
