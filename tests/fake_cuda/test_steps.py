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


@pytest.mark.parametrize("model", ["llama", "deepseek"])
def test_a_pool_whose_blocks_lie_apart_costs_no_kernel_more(measurements, model, monkeypatch):
    """Decode rows beside a prompt without graphs, in which kernels would not count: no cache is made contiguous."""
    engine = engines.make(measurements.folder(model))
    runner, found = engine.runner, []
    runner._graphs = runner._pieces = None
    apart = list(runner._kv_layers)
    assert all(layer[0].is_contiguous() and not layer.is_contiguous() for layer in apart)
    attend = runner._backend.paged.attend

    def copying(out, queries, kv_layer, *rest):
        attend(out, queries, kv_layer.contiguous(), *rest)

    with engines.decoding(engine, 4) as step:
        engines.add_prompt(engine, 3000)
        for _ in range(3):
            step()  # from now on all are alike: four rows and 124 tokens of the prompt
        for layers, attending in ((apart, attend), ([layer.contiguous() for layer in apart], attend), (apart, copying)):
            runner._kv_layers = layers
            monkeypatch.setattr(runner._backend.paged, "attend", attending)
            counted = engines.counts_of(step)
            found.append([counts | {"allocations": 0} for counts in counted])  # of what earlier engines left
    engine.close()
    assert found[0] == found[1]
    assert all(copied["kernels"] > plain["kernels"] for copied, plain in zip(found[2], found[0], strict=True))


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
