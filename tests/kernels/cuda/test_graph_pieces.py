"""Steps in pieces over the fake GPU: replayed they equal the plain step, padding changes nothing, captures touch no
host.
"""

import dataclasses

import pytest
import torch

from kvrelay.kernels.backend import AttentionShape
from kvrelay.kernels.cuda.backend import alias_of, unowned
from kvrelay.kernels.cuda.graph_pieces import StepPieces
from tests.kernels.cuda.fake_gpu import OnHost, on_host
from tests.kernels.cuda.test_backend import Decoder, cuda, dense_latent_folder, fake_gpu, folder  # noqa: F401

# ruff: noqa: F811

one_family = pytest.mark.parametrize("folder", ["llama"], indirect=True)
NEAR = {"atol": 3e-2, "rtol": 3e-2}
STEPS = (
    ((1, 33), (1, 60), (5, 5)),  # 7 tokens
    ((1, 33), (1, 60), (5, 5), (17, 40)),  # 24
    ((8, 90),),
    ((1, 5), (1, 80)),  # all decode
    ((1, 1), (3, 3), (9, 20)),
)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def assert_pieces_equal_steps(decoder, pieces, wrap=lambda batch: batch):
    """Hidden states, and the whole cache: what is not the step's own keeps its contents."""
    layers = list(range(decoder.model.spec.num_layers))
    for seed, sequences in enumerate(STEPS):
        token_ids, batch = decoder.step(sequences, seed)
        batch, before = wrap(batch), decoder.kv.clone()
        plain, cache = decoder.plain(token_ids, batch).clone(), decoder.kv.clone()
        decoder.kv.copy_(before)
        assert pieces.fits(batch)
        seen = []
        replayed = pieces.run(token_ids, batch, decoder.forward, seen.append)
        torch.testing.assert_close(replayed, plain, **NEAR)
        torch.testing.assert_close(decoder.kv, cache, **NEAR)
        assert seen == layers


def test_a_step_in_pieces_equals_the_step_on_a_fake_gpu(fake_gpu, folder, request):
    decoder = Decoder(fake_gpu, folder, kv_layout="HND" if "qwen3" in request.node.name else "NHD")
    assert_pieces_equal_steps(decoder, StepPieces(fake_gpu, decoder.shape, sizes=(8, 32)), on_host)
    assert fake_gpu.gpu.num_captures == 2 * (decoder.model.spec.num_layers + 1)


def test_a_step_with_latent_attention_in_pieces_equals_the_step_on_a_fake_gpu(fake_gpu, dense_latent_folder):
    decoder = Decoder(fake_gpu, dense_latent_folder)
    assert_pieces_equal_steps(decoder, StepPieces(fake_gpu, decoder.shape, sizes=(8, 32)), on_host)
    assert fake_gpu.gpu.num_captures == 2 * (decoder.model.spec.num_layers + 1)


@one_family
def test_pieces_captured_before_the_first_request_write_nothing_and_replay(fake_gpu, folder):
    decoder = Decoder(fake_gpu, folder)
    pieces, before = StepPieces(fake_gpu, decoder.shape, sizes=(8, 32)), decoder.kv.clone()
    pieces.warm_up(decoder.forward)
    num_captures = fake_gpu.gpu.num_captures
    assert num_captures > 0 and torch.equal(decoder.kv, before)
    assert_pieces_equal_steps(decoder, pieces)
    assert fake_gpu.gpu.num_captures == num_captures
    pieces.reset()
    assert_pieces_equal_steps(decoder, pieces)
    assert fake_gpu.gpu.num_captures == 2 * num_captures


@one_family
@pytest.mark.parametrize("forgotten", ["token_ids", "positions"])
def test_a_replay_that_keeps_the_last_steps_metadata_is_seen(fake_gpu, folder, forgotten):
    """The control: buffers that are not filled anew."""
    decoder = Decoder(fake_gpu, folder)
    pieces = StepPieces(fake_gpu, decoder.shape, sizes=(8, 32))
    pieces.warm_up(decoder.forward)
    for size, one in pieces._graphs.items():
        copy = getattr(one, forgotten).clone()  # replay reads the old one
        pieces._graphs[size] = dataclasses.replace(one, **{forgotten: copy})
    with pytest.raises(AssertionError, match="not close"):
        assert_pieces_equal_steps(decoder, pieces)


@one_family
def test_a_forward_that_copies_metadata_by_itself_cannot_be_captured_in_pieces(fake_gpu, folder):
    decoder = Decoder(fake_gpu, folder)
    token_ids, batch = decoder.step(((1, 33), (5, 5)), 0)
    held = token_ids.as_subclass(OnHost)

    def copying(token_ids, batch, plan):
        return decoder.forward(held[: len(token_ids)].to(fake_gpu.device), batch, plan)

    with pytest.raises(RuntimeError, match="touches host memory in a capture"):
        StepPieces(fake_gpu, decoder.shape, sizes=(6,)).run(token_ids, batch, copying)
    assert fake_gpu.gpu.calls is None  # the capture has ended
    assert_pieces_equal_steps(decoder, StepPieces(fake_gpu, decoder.shape, sizes=(8, 32)))  # and so has the recorder


@one_family
def test_only_steps_that_flashinfer_attends_to_are_taken_to_pieces(fake_gpu, folder):
    decoder = Decoder(fake_gpu, folder)
    _, batch = decoder.step(((1, 33), (5, 5)), 0)

    def fits(**changes):
        shape = dataclasses.replace(AttentionShape(6, 2, 64, 16, torch.bfloat16), **changes)
        return StepPieces(fake_gpu, shape, sizes=(4, 6)).fits(batch)

    assert fits() and fits(kv_dtype=torch.bfloat16)
    assert not fits(dtype=torch.float32) and not fits(head_dim=32) and not fits(kv_dtype=torch.float8_e4m3fn)
    assert fits(num_heads=8, head_dim=576, latent_dim=512) and not fits(latent_dim=32)
    assert not StepPieces(fake_gpu, decoder.shape, sizes=(4,)).fits(batch)


@torch.inference_mode()
def test_a_borrowed_view_is_the_same_memory_and_does_not_hold_it():
    heads = torch.randn(5, 7, 8).to(torch.bfloat16)
    view = heads[:, 2:5]
    found = alias_of(view)
    assert torch.equal(found, view) and found.stride() == view.stride()
    view[1] = 3.0
    assert torch.equal(found, view) and found.untyped_storage()._cdata != view.untyped_storage()._cdata
    assert unowned(view) is view  # without a GPU there is no memory pool


@pytest.mark.gpu
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_a_step_in_pieces_equals_the_step(cuda, folder, kv_layout):
    with torch.inference_mode():
        decoder = Decoder(cuda, folder, kv_layout=kv_layout)
        assert_pieces_equal_steps(decoder, StepPieces(cuda, decoder.shape, sizes=(8, 32)))
