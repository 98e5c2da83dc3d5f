"""Steps on a (fake) GPU begin without waiting for the previous one, and copy from pinned memory only."""

import pytest
import torch
from torch import Tensor

from kvrelay.kernels.backend import TokenFeed
from kvrelay.kernels.cuda.cuda_graphs import CudaGraphs
from kvrelay.kernels.cuda.staging import DeviceStaging
from kvrelay.kernels.oracle.reference import ReferenceBackend
from tests.kernels.cuda.fake_gpu import FakeEvent, OnHost, fake_gpu, on_host  # noqa: F401
from tests.kernels.cuda.test_backend import Decoder, folder  # noqa: F401

one_model = pytest.mark.parametrize("folder", ["llama"], indirect=True)


def test_a_gpu_computes_by_itself_and_a_cpu_does_not(fake_gpu):  # noqa: F811
    assert fake_gpu.asynchronous is fake_gpu and ReferenceBackend("cpu").asynchronous is None


def test_tokens_are_read_by_the_host_once_they_are_there(fake_gpu):  # noqa: F811
    pending = fake_gpu.pending(torch.tensor([5, 7]))
    assert FakeEvent.num_waits == 0
    assert pending.wait() == [5, 7] and FakeEvent.num_waits == 1
    assert fake_gpu.pending(torch.empty(0, dtype=torch.int64)).wait() == []


def test_what_the_host_does_not_know_is_taken_from_the_device(fake_gpu):  # noqa: F811
    ids, sources = torch.tensor([0, 11, 0, 12]), torch.tensor([2, -1, 0, -1])
    placed = fake_gpu.place(ids.as_subclass(OnHost), TokenFeed(sources.as_subclass(OnHost), torch.tensor([70, 71, 72])))
    assert placed.tolist() == [72, 11, 70, 12] and not isinstance(placed, OnHost)
    assert fake_gpu.place(ids, None).tolist() == ids.tolist()
    assert OnHost.num_waits == 0


def test_a_step_of_the_same_rows_takes_the_last_ones_tokens_as_they_are(fake_gpu):  # noqa: F811
    tokens = torch.tensor([70, 71, 72])
    assert fake_gpu.place(torch.zeros(3, dtype=torch.int64), TokenFeed(torch.arange(3), tokens)) is tokens
    for sources in ([0, 1], [0, 2, 1], [0, 1, -1], [0, 1, 2, -1]):
        sources = torch.tensor(sources)
        placed = fake_gpu.place(torch.full_like(sources, 9), TokenFeed(sources, tokens))
        assert placed is not tokens and placed.tolist() == [9 if at < 0 else 70 + at for at in sources.tolist()]


def test_a_wrapper_is_planned_again_when_the_copies_of_its_last_plan_were_made(fake_gpu):  # noqa: F811
    staging, first, second = DeviceStaging(torch.device("cpu:0")), object(), object()
    for wrapper, num_waits in ((first, 0), (second, 0), (first, 1), (first, 2), (second, 3)):
        with staging.planning(wrapper):
            assert FakeEvent.num_waits == num_waits


def steps(backend, folder):  # noqa: F811
    """Decode steps through a graph and one beside a prompt's chunk: what was computed."""
    decoder = Decoder(backend, folder)
    graphs, found = CudaGraphs(backend, decoder.shape, max_blocks=8, sizes=(4,)), []
    for seed in range(3):
        token_ids, batch = decoder.step(((1, 33), (1, 60), (1, 5)), seed)
        token_ids = backend.place(token_ids.as_subclass(OnHost), None)
        found.append(graphs.run(token_ids, on_host(batch), decoder.forward).clone())
    token_ids, batch = decoder.step(((1, 33), (17, 40)), 4)
    found.append(decoder.plain(backend.place(token_ids, None), on_host(batch)))
    return found


@one_model
def test_no_step_waits_for_the_device_but_for_a_wrappers_last_plan(fake_gpu, folder):  # noqa: F811
    steps(fake_gpu, folder)
    assert OnHost.num_waits == 0
    assert FakeEvent.num_waits > 0  # this device never comes as far as the plan's copies by itself


@one_model
def test_copies_from_memory_that_is_not_pinned_are_noticed(fake_gpu, folder, monkeypatch):  # noqa: F811
    expected = steps(fake_gpu, folder)
    monkeypatch.setattr(DeviceStaging, "put", lambda self, x: x.to(self._device))
    found = steps(fake_gpu, folder)
    assert OnHost.num_waits > 0
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_memory_that_the_device_has_yet_to_copy_is_not_written(fake_gpu, monkeypatch):  # noqa: F811
    """What is handed in may be changed at once: it is copied to pinned memory first."""
    ids = torch.tensor([1, 2, 3])
    seen: list[Tensor] = []
    real = Tensor.pin_memory
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: seen.append(real(self)) or seen[-1])
    fake_gpu.place(ids, None)
    ids.zero_()
    assert seen[0].tolist() == [1, 2, 3]
