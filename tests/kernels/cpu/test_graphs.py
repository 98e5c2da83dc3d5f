"""Recorded steps give what the calls one by one give, bit for bit, for every family and any number of tokens."""

import gc
import threading
from dataclasses import replace

import pytest
import torch

from kvrelay.engine.checkpoints.loading import load_model
from kvrelay.engine.checkpoints.tiny import TINY_CONFIGS, tiny_checkpoint
from kvrelay.engine.step.build import load_engine
from kvrelay.engine.step.config import EngineConfig
from kvrelay.hashing import block_hashes
from kvrelay.kernels.backend import AttentionBatch
from kvrelay.kernels.cpu.backend import CpuBackend
from kvrelay.kernels.cpu.recorded_steps import MOST_HEADED, RecordedSteps, _Buffers
from kvrelay.plane.messages import Sampling, SequenceRequest

BLOCK_SIZE, NUM_BLOCKS, MAX_BLOCKS = 4, 80, 12
MAX_RUNNING, MAX_TOKENS = 10, 64


def decode_batch(contexts, generator):
    """One new token for each context; blocks scattered."""
    width = max(-(-context // BLOCK_SIZE) for context in contexts)
    free = torch.randperm(NUM_BLOCKS, generator=generator).to(torch.int32)
    tables = torch.zeros(len(contexts), width, dtype=torch.int32)
    for row, context in enumerate(contexts):
        needed = -(-context // BLOCK_SIZE)
        tables[row, :needed], free = free[:needed], free[needed:]
    positions = torch.tensor(contexts) - 1
    blocks = tables[torch.arange(len(contexts)), positions // BLOCK_SIZE].long()
    return AttentionBatch(
        query_starts=torch.arange(len(contexts) + 1, dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
        positions=positions,
        num_decode=len(contexts),
        max_query_len=1,
        max_context_len=max(contexts),
    )


def mixed(parts, generator):
    """Sequences of (context, tokens to compute at its end), those of one token first."""
    decode = decode_batch([context for context, _ in parts], generator)
    tokens = torch.tensor([count for _, count in parts])
    positions = torch.cat([torch.arange(context - count, context) for context, count in parts])
    owner = torch.repeat_interleave(torch.arange(len(parts)), tokens)
    return replace(
        decode,
        query_starts=torch.cat((torch.zeros(1), tokens.cumsum(0))).to(torch.int32),
        positions=positions,
        num_decode=int((tokens == 1).sum()),
        slot_mapping=decode.block_tables[owner, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE,
        max_query_len=int(tokens.max()),
    )


class Decoder:
    """A tiny model over a cache of random keys and values, with and without graphs."""

    def __init__(self, backend, folder, dtype, max_blocks=MAX_BLOCKS):
        self.model = load_model(folder, backend, dtype, block_size=BLOCK_SIZE)
        self.backend, shape = backend, self.model.attention_shape
        self.generator = torch.Generator().manual_seed(3)
        sizes = (self.model.spec.num_layers, NUM_BLOCKS, 2, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
        self.kv = torch.randn(*sizes, generator=self.generator).to(dtype)
        sizes = {"max_blocks": max_blocks, "max_running": MAX_RUNNING, "max_tokens": MAX_TOKENS}
        self.graphs = RecordedSteps(backend.compiled_kernels, shape, **sizes, head=self.model.logits)

    def forward(self, token_ids, batch, plan, on_layer=None):
        return self.model.forward(token_ids, batch, plan, list(self.kv), on_layer)

    def plain(self, token_ids, batch):
        """Every row by itself."""
        native = self.backend.compiled_kernels
        worth, native.worth = native.worth, 1 << 40
        plan = self.backend.plan(batch, self.model.attention_shape)
        native.worth = worth
        return self.forward(token_ids, batch, plan)

    def both(self, contexts, shared=0):
        """(hidden, cache) of one step without and with graphs, from the same cache. shared: blocks of row 1 that are
        row 0's.
        """
        batch = decode_batch(contexts, self.generator)
        batch.block_tables[1:2, :shared] = batch.block_tables[:1, :shared]
        return self.both_of(batch)

    def both_of(self, batch, on_layer=None):
        token_ids = torch.randint(3, self.model.spec.vocab_size, (len(batch.positions),), generator=self.generator)
        before = self.kv.clone()
        plain = self.plain(token_ids, batch).clone(), self.kv.clone()
        self.kv.copy_(before)
        assert self.graphs.fits(batch)
        return plain, (self.graphs.run(token_ids, batch, self.forward, on_layer), self.kv)


@pytest.fixture(params=["compiled", "compiled_2_threads"])
def backend(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", [name for name in TINY_CONFIGS if not name.startswith("deepseek")])
def test_a_replayed_step_equals_the_step(backend, family, dtype, tmp_path):
    folder = tiny_checkpoint(family, tmp_path)
    decoder = Decoder(backend, folder, dtype)
    backend.pack_linear(torch.randn(8, 8).to(dtype))
    if backend.describe()[f"linear_{str(dtype).removeprefix('torch.')}"] != "native":
        pytest.skip("another linear kernel is faster here: nothing is recorded")
    for contexts in ([1], [7], [8, 3, 20], [9, 4, 21], [48], [2, 1, 1], [12]):
        (hidden, cache), (replayed, its_cache) = decoder.both(contexts)
        assert torch.equal(hidden, replayed)
        assert torch.equal(cache, its_cache)
    assert decoder.graphs.has_captures and decoder.graphs.why_not is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_steps_of_prompts_are_replayed_too(backend, family, dtype, tmp_path):
    """One recording serves any number of tokens and of sequences, whichever step came first."""
    decoder = Decoder(backend, tiny_checkpoint(family, tmp_path), dtype)
    backend.pack_linear(torch.randn(8, 8).to(dtype))
    if backend.describe()[f"linear_{str(dtype).removeprefix('torch.')}"] != "native":
        pytest.skip("another linear kernel is faster here: nothing is recorded")
    for parts in (
        ((9, 5),),
        ((48, 48),),
        ((5, 1), (20, 1), (48, 40)),
        ((12, 1),),
        ((48, 30), (40, 34)),
        ((7, 1), (8, 2), (9, 3), (12, 12)),
        ((1, 1),) * MAX_RUNNING,
    ):
        (hidden, cache), (replayed, its_cache) = decoder.both_of(mixed(parts, decoder.generator))
        assert torch.equal(hidden, replayed) and torch.equal(cache, its_cache)
    assert decoder.graphs.why_not is None


def test_each_layer_is_heard_of_when_its_keys_and_values_are_stored(compiled, tmp_path):
    """While the step is recorded, too; and what is done about it is not."""
    decoder = Decoder(compiled, tiny_checkpoint("llama", tmp_path), torch.float32)
    heard = []

    def on_layer(layer):
        torch.ones(3) * 2.0
        compiled.rms_norm(torch.ones(1, 8), torch.ones(8), 1e-5)
        heard.append((layer, decoder.kv.clone()))

    for parts in (((20, 9),), ((8, 1), (48, 33))):
        heard.clear()
        batch, before = mixed(parts, decoder.generator), decoder.kv.clone()
        (hidden, cache), (replayed, _) = decoder.both_of(batch, on_layer)
        assert torch.equal(hidden, replayed) and decoder.graphs.has_captures
        assert [layer for layer, _ in heard] == list(range(decoder.model.spec.num_layers))
        for layer, seen in heard:
            assert torch.equal(seen[: layer + 1], cache[: layer + 1])
            assert torch.equal(seen[layer + 1 :], before[layer + 1 :])


def test_few_sequences_logits_belong_to_the_recording(backend, tmp_path):
    decoder = Decoder(backend, tiny_checkpoint("llama", tmp_path), torch.float32)
    few, many = [5, 9, 1], [3] * (MOST_HEADED + 1)
    for contexts in (few, [7, 2, 20], many, [4], few, [1] * MOST_HEADED):
        is_first = not decoder.graphs.has_captures
        (hidden, _), (replayed, _) = decoder.both(contexts)
        known = decoder.graphs.logits_of(replayed)
        if is_first or contexts is many:
            assert known is None
        else:
            assert torch.equal(known, decoder.model.logits(hidden))
        assert decoder.graphs.logits_of(hidden) is None, "of another tensor than the last run's"
    (_, _), (replayed, _) = decoder.both_of(mixed(((20, 5),), decoder.generator))
    assert decoder.graphs.logits_of(replayed) is None, "no sequence decodes"
    decoder.graphs.reset()
    assert decoder.graphs.logits_of(replayed) is None


def test_a_head_that_torch_computes_leaves_the_step_recorded(backend, tmp_path):
    """Gemma 2 caps its logits."""
    decoder = Decoder(backend, tiny_checkpoint("gemma2", tmp_path), torch.float32)
    for _ in range(2):
        (hidden, _), (replayed, _) = decoder.both([5, 9])
        assert torch.equal(hidden, replayed) and decoder.graphs.logits_of(replayed) is None
    assert decoder.graphs.has_captures and decoder.graphs.why_not is None


def test_what_rows_share_is_found_anew_for_every_replay(backend, tmp_path):
    """The schedule is no part of a recording: sharing comes, changes and goes, and results stay those of rows alone."""
    decoder = Decoder(backend, tiny_checkpoint("llama", tmp_path), torch.float32, max_blocks=40)
    native, spared = backend.compiled_kernels, []
    worth, native.worth = native.worth, 64
    try:
        for contexts, shared in (
            ((150, 140, 12), 0),
            ((149, 141, 11), 32),
            ((150, 142, 12), 17),
            ((90, 150, 40), 20),
            ((20, 21, 12), 5),
            ((70, 12), 3),
            ((140, 150), 34),
            ((151, 141, 13), 33),
            ((70, 72, 74), 0),
        ):
            before = native.spared_tokens
            (hidden, cache), (replayed, its_cache) = decoder.both(contexts, shared)
            assert torch.equal(hidden, replayed) and torch.equal(cache, its_cache)
            spared.append(native.spared_tokens - before)
    finally:
        native.worth = worth
    assert spared == [0, 128, 64, 64, 0, 0, 128, 128, 0]
    assert decoder.graphs.has_captures and decoder.graphs.why_not is None


def test_a_wrong_address_in_a_recording_is_noticed(compiled, tmp_path, monkeypatch):
    """The check after recording is no formality: a tape that drops a call turns recording off."""
    decoder = Decoder(compiled, tiny_checkpoint("llama", tmp_path), torch.float32)
    import kvrelay.kernels.cpu.recorded_steps as cpu_graphs

    class Forgetful(cpu_graphs._Tape):
        def __getattr__(self, name):
            run = super().__getattr__(name)
            return self._lib.kr_gate if name == "kr_gate" else run

    monkeypatch.setattr(cpu_graphs, "_Tape", Forgetful)
    (hidden, _), (first, _) = decoder.both([6])
    assert decoder.graphs.why_not == "the replay's result differs"
    assert torch.equal(hidden, first)


def test_a_call_that_is_missing_from_the_heads_recording_is_noticed(compiled, tmp_path, monkeypatch):
    import kvrelay.kernels.cpu.recorded_steps as cpu_graphs

    decoder = Decoder(compiled, tiny_checkpoint("llama", tmp_path), torch.bfloat16)
    decoder.both([6])
    if not decoder.graphs.has_captures:
        pytest.skip("another linear kernel is faster here: nothing is recorded")

    class Forgetful(cpu_graphs._Tape):
        def __getattr__(self, name):
            run = super().__getattr__(name)
            return self._lib.kr_linear if name == "kr_linear" else run

    monkeypatch.setattr(cpu_graphs, "_Tape", Forgetful)
    for _ in range(2):
        (hidden, _), (replayed, _) = decoder.both([6])
        assert torch.equal(hidden, replayed) and decoder.graphs.logits_of(replayed) is None


def test_what_torch_computes_is_never_recorded(compiled, tmp_path):
    decoder = Decoder(compiled, tiny_checkpoint("llama", tmp_path), torch.float32)
    plain = decoder.forward
    decoder.forward = lambda *step: plain(*step) * 2.0
    (hidden, _), (first, _) = decoder.both([6])
    assert torch.equal(hidden, first)
    assert "aten.mul" in decoder.graphs.why_not and not decoder.graphs.has_captures
    assert not decoder.graphs.fits(decode_batch([6], decoder.generator))


def test_two_engines_of_one_process_do_not_record_at_the_same_time(compiled, tmp_path):
    """torch keeps a dangling pointer where two threads come to an operator first, each under its dispatch mode."""
    folder = tiny_checkpoint("llama", tmp_path)
    first, second = (Decoder(backend, folder, torch.float32) for backend in (compiled, CpuBackend(1)))
    entered, may_go, order = threading.Event(), threading.Event(), []

    def forward_of(decoder, name):
        def forward(token_ids, batch, plan, on_layer=None):
            order.append(f"{name} begins")
            if name == "first":
                entered.set()
                may_go.wait(20)
            hidden = decoder.forward(token_ids, batch, plan, on_layer)
            order.append(f"{name} ends")
            return hidden

        return forward

    def record(decoder, name):
        batch = decode_batch([3, 7], decoder.generator)
        with torch.inference_mode():
            decoder.graphs.run(torch.tensor([1, 2]), batch, forward_of(decoder, name))

    threads = [threading.Thread(target=record, args=one) for one in ((first, "first"), (second, "second"))]
    threads[0].start()
    assert entered.wait(20)
    threads[1].start()
    threads[1].join(0.5)  # it would be through by now
    may_go.set()
    for thread in threads:
        thread.join(20)
    assert order == ["first begins", "first ends", "second begins", "second ends"]
    assert first.graphs.has_captures and second.graphs.has_captures


def test_steps_that_are_larger_than_the_engine_said_do_not_fit(compiled, tmp_path):
    graphs = Decoder(compiled, tiny_checkpoint("llama", tmp_path), torch.float32).graphs
    generator = torch.Generator().manual_seed(0)
    assert graphs.fits(decode_batch([1] * MAX_RUNNING, generator))
    assert not graphs.fits(decode_batch([1] * (MAX_RUNNING + 1), generator))
    assert graphs.fits(mixed(((48, 48), (20, MAX_TOKENS - 48)), generator))
    assert not graphs.fits(mixed(((48, 48), (20, MAX_TOKENS - 47)), generator))


def test_a_buffer_is_used_again_only_when_no_view_of_it_is_left():
    buffers = _Buffers(4, 8)
    first = buffers.empty((4, 6), torch.float32)
    part = first[1:, :2]
    address = first.data_ptr()
    del first
    gc.collect()
    other = buffers.empty((4, 6), torch.float32)
    assert other.data_ptr() != address
    del part
    gc.collect()
    assert buffers.empty((4, 6), torch.float32).data_ptr() == address


def test_an_engine_keeps_its_tokens_when_the_rotary_tables_grow(compiled, tmp_path):
    """Tables that move make recordings stale: they are made again."""
    folder = tiny_checkpoint("llama", tmp_path)
    outputs = []
    for with_graphs in (True, False):
        engine = load_engine(folder, compiled, torch.float32, EngineConfig(kv_memory_bytes=8 << 20))
        engine.model._cos_sin = tuple(table[:16].clone() for table in engine.model._cos_sin)
        if not with_graphs:
            engine.runner._graphs = None
        prompt = [5, 9, 17, 4, 8]
        engine.add(
            SequenceRequest(
                request_id="a",
                token_ids=prompt,
                num_prompt_tokens=len(prompt),
                block_hashes=list(block_hashes(prompt, 16)),
                sampling=Sampling(max_tokens=60, temperature=0.0, ignore_eos=True),
            )
        )
        tokens = []
        while engine.scheduler.has_work:
            tokens += [token for output in engine.step().outputs for token in output.token_ids]
        outputs.append(tokens)
        if with_graphs:
            assert engine.runner._graphs.has_captures and engine.model.num_positions >= 64
    assert outputs[0] == outputs[1] and len(outputs[0]) == 60
