"""Which prefill kernels are chosen, over the fake GPU: the faster that builds and agrees."""

import types

import pytest
import torch

from kvrelay.kernels.backend import AttentionShape
from kvrelay.kernels.cuda.graph_pieces import StepPieces
from kvrelay.kernels.cuda.prefill_kernels import PrefillKernels
from tests.kernels.cuda.fake_gpu import FakePrefill, fake_gpu  # noqa: F401

# ruff: noqa: F811

SHAPE = AttentionShape(2, 1, 64, 16, torch.bfloat16)
VARIANT = (0.125, None, None)


@pytest.fixture
def seconds(monkeypatch):
    """What a prompt takes by each kernel; results are the same."""
    taken = {"fa2": 3.0, "fa3": 2.0}
    measured = []

    def prompt(self, kernels, shape, variant):
        self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, shape.kv_layout, backend=kernels)
        measured.append(kernels)
        return torch.ones(2) * taken.get(f"result of {kernels}", 1.0), taken[kernels]

    monkeypatch.setattr(PrefillKernels, "_prompt", prompt)
    return taken


def chosen(fake_gpu, variant=VARIANT, of=VARIANT):
    StepPieces(fake_gpu, SHAPE).choose_kernels([variant])
    kernels = fake_gpu.paged.prefill_kernels.of(SHAPE, of)
    return kernels, fake_gpu.paged._wrapper("prefill", SHAPE, of, kernels).backend


def test_the_faster_kernel_is_taken_on_hopper(fake_gpu, seconds):
    assert chosen(fake_gpu) == ("fa3", "fa3")
    seconds["fa3"] = 4.0
    assert chosen(fake_gpu) == ("fa2", "fa2")


def test_what_has_not_been_tried_takes_fa2(fake_gpu, seconds):
    assert chosen(fake_gpu, of=(0.125, 20, None)) == ("fa2", "fa2")


def test_another_processor_tries_nothing(fake_gpu, seconds, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert chosen(fake_gpu) == ("fa2", "fa2")


def test_kernels_that_are_not_compiled_are_left_alone(fake_gpu, seconds):
    """That would take minutes of a worker's start."""
    fake_gpu.gpu.hopper_spec = types.SimpleNamespace(name="fa3", is_aot=False, write_ninja=not_installed)
    assert chosen(fake_gpu) == ("fa2", "fa2")


def not_installed():
    raise RuntimeError("no nvcc")


def test_kernels_that_do_not_build_are_logged_once_and_not_used(fake_gpu, seconds, caplog):
    fake_gpu.gpu.kernels = {"fa2"}
    assert chosen(fake_gpu) == ("fa2", "fa2")
    assert caplog.text.count("fa3 does not work here") == 1


def test_kernels_that_disagree_are_not_taken(fake_gpu, seconds, caplog):
    seconds["result of fa3"] = 1.1
    assert chosen(fake_gpu) == ("fa2", "fa2") and "differ" in caplog.text


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_both_compute_the_same_prompt(fake_gpu, kv_layout, monkeypatch):
    monkeypatch.setattr("kvrelay.kernels.cuda.prefill_kernels._TOKENS", 40)
    shape = AttentionShape(2, 1, 64, 16, torch.bfloat16, kv_layout)
    found = fake_gpu.paged.prefill_kernels.try_out(shape, (0.125, 20, 5.0))
    assert set(found) == {"fa2", "fa3"} and all(seconds > 0 for seconds in found.values())


def test_a_kernel_that_hides_old_tokens_is_not_taken(fake_gpu, monkeypatch, caplog):
    monkeypatch.setattr("kvrelay.kernels.cuda.prefill_kernels._TOKENS", 40)
    right = FakePrefill.plan

    def plan(self, *args, window_left, **options):
        right(self, *args, window_left=20 if self.backend == "fa3" else window_left, **options)

    monkeypatch.setattr(FakePrefill, "plan", plan)
    assert set(fake_gpu.paged.prefill_kernels.try_out(SHAPE, VARIANT)) == {"fa2"} and "differ" in caplog.text
