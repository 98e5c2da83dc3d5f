"""Tokens do not depend on what became of a pre-empted sequence: swapped, computed again, or handed back."""

import time

import msgspec
import pytest
import torch

from kvrelay.engine.step.build import load_engine
from kvrelay.engine.step.config import EngineConfig, Extensions
from kvrelay.engine.step.engine import Engine
from kvrelay.engine.worker.build import make_swap_area
from kvrelay.hashing import block_hashes
from kvrelay.kernels.select import select_backend
from kvrelay.kvcache.memory import swap
from kvrelay.plane.messages import Group, Sampling, SequenceRequest
from kvrelay.types import FinishReason
from tests.engine.tiny import tiny_llama

VOCAB, BLOCK = 97, 8
BLOCK_BYTES = BLOCK * 3 * 2 * 2 * 16 * 4
SAMPLINGS = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 1.0, "seed": 7}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
def make(folder):
    engines: list[Engine] = []

    def build(
        *, blocks: int, mode: str = "auto", swap_blocks: int = 64, checks: str = "full", caches: bool = True
    ) -> Engine:
        config = EngineConfig(
            block_size=BLOCK,
            kv_memory_bytes=blocks * BLOCK_BYTES,
            token_budget=48,
            preemption=mode,
            prefix_caching=caches,
        )
        extensions = Extensions(
            swap_area=lambda kv: make_swap_area(kv.memory, swap_blocks * BLOCK_BYTES, checks, lambda: None)
        )
        engine = load_engine(folder, select_backend("cpu", "cpu", 1), torch.float32, config, extensions)
        engines.append(engine)
        return engine

    yield build
    for engine in engines:
        engine.close()


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [prompt_of(20, seed) for seed in range(4)]


def request(name: str, prompt: list[int], **sampling) -> SequenceRequest:
    return SequenceRequest(
        request_id=name,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        block_hashes=list(block_hashes(prompt, BLOCK)),
        sampling=Sampling(max_tokens=24, ignore_eos=True, **sampling),
    )


def drain(engine: Engine, before_step=None) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    deadline = time.monotonic() + 60
    while engine.scheduler.has_work:
        if before_step is not None:
            before_step()
        for output in engine.step().outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        engine.check()
        assert time.monotonic() < deadline
    return tokens


def serve(engine: Engine, before_step=None, **sampling) -> list[list[int]]:
    for index, prompt in enumerate(PROMPTS):
        engine.add(request(str(index), prompt, **sampling))
    tokens = drain(engine, before_step)
    return [tokens[str(index)] for index in range(len(PROMPTS))]


def ways(engine: Engine) -> dict[str, int]:
    return engine.reports.load().preempted


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize("mode", ["swap", "swap, by a thread", "recompute", "auto"])
def test_tokens_are_those_of_an_undisturbed_run(make, mode, sampling, caches, monkeypatch):
    mode, _, is_long = mode.partition(",")
    if is_long:
        monkeypatch.setattr(swap, "_INLINE_S", -1.0)
    undisturbed = make(blocks=64)
    expected = serve(undisturbed, **sampling)
    assert not ways(undisturbed)
    engine = make(blocks=13, mode=mode, caches=caches)
    assert serve(engine, **sampling) == expected
    assert sum(ways(engine).values()) > 0 and (mode == "auto" or set(ways(engine)) == {mode})
    load = engine.reports.load()
    assert (load.used_blocks, load.swapped, load.swapped_blocks) == (0, 0, 0)
    assert (load.swap_out_s > 0) == ("swap" in ways(engine))


def rot(engine: Engine) -> int:
    """Change what is swapped out now; how many blocks."""
    slab = engine.scheduler.preemption.area.slab
    slots = [slot for seq in engine.scheduler.swapped for slot in seq.swapped.rows]
    for slot in slots:
        view = slab.row(slot)
        view[:] = bytes(byte ^ 0x5A for byte in view)
    return len(slots)


@pytest.mark.parametrize("at_once_s", [1.0, -1.0], ids=["at once", "by a thread"])
@pytest.mark.parametrize("checks", ["full", "off"])
def test_a_swapped_block_that_rots_is_found_and_computed_anew_but_with_checks_off_the_answer_changes(
    make, checks, at_once_s, monkeypatch
):
    monkeypatch.setattr(swap, "_INLINE_S", at_once_s)
    expected = serve(make(blocks=64), temperature=0.0)
    engine = make(blocks=13, mode="swap", checks=checks, caches=False)
    rotten: set[str] = set()

    def once_each():
        new = [seq for seq in engine.scheduler.swapped if seq.request_id not in rotten]
        if new and len(new) == len(engine.scheduler.swapped):
            rot(engine)
            rotten.update(seq.request_id for seq in new)

    got = serve(engine, once_each, temperature=0.0)
    assert rotten
    assert (engine.reports.load().swap_corrupt_blocks > 0) == (checks == "full")
    assert (got == expected) == (checks == "full")


def test_prompt_logprobs_survive_a_swap_and_come_once(make):
    """The prompt is computed in two steps; between them its first half is swapped out."""

    def logprobs(engine: Engine, *, swaps: bool) -> list[tuple[int, float]]:
        engine.add(request("a", prompt_of(70, 9), temperature=0.0, prompt_logprobs=0))
        engine.step()
        if swaps:
            engine.scheduler.preempt_group((engine.scheduler.sequences["a"],))
            engine.runner.forget(engine.scheduler.swapped[0])
        outputs = [output for _ in range(4) for output in engine.step().outputs]
        return [(one.token_id, round(one.logprob, 4)) for one in outputs[0].prompt_logprobs]

    assert logprobs(make(blocks=64, mode="swap"), swaps=True) == logprobs(make(blocks=64), swaps=False)


def test_a_returned_sequence_goes_on_from_another_engine_and_leaves_nothing(make):
    prompt = PROMPTS[0]
    undisturbed = make(blocks=64)
    undisturbed.add(request("a", prompt, temperature=1.0, seed=3))
    expected = drain(undisturbed)["a"]
    engine = make(blocks=64, mode="return-to-prefill")
    engine.add(request("a", prompt, temperature=1.0, seed=3))
    engine.scheduler.sequences["a"].prefill_tokens_per_s = 1.0
    tokens = [token for _ in range(5) for output in engine.step().outputs for token in output.token_ids]
    engine.scheduler.preempt_group((engine.scheduler.sequences["a"],))
    assert engine.step().returned_to_prefill == ["a"] and engine.step().returned_to_prefill == []
    assert engine.reports.load().used_blocks == 0 and engine.reports.load().preempted == {"return-to-prefill": 1}
    rest = SequenceRequest(
        request_id="a~2",
        token_ids=prompt + tokens,
        num_prompt_tokens=len(prompt),
        block_hashes=list(block_hashes(prompt + tokens, BLOCK)),
        num_prefill_returns=1,
        sampling=Sampling(max_tokens=24, ignore_eos=True, temperature=1.0, seed=3),
    )
    other = make(blocks=64)
    other.add(rest)
    assert tokens + drain(other)["a~2"] == expected


def test_an_abort_while_swapped_gives_the_host_memory_back(make):
    engine = make(blocks=13, mode="swap")
    for index, prompt in enumerate(PROMPTS):
        engine.add(request(str(index), prompt, temperature=0.0))
    while not engine.scheduler.swapped:
        engine.step()
    assert engine.reports.load().swapped_bytes > 0
    for name in list(engine.scheduler.sequences):
        engine.scheduler.finish(engine.scheduler.sequences[name], FinishReason.ABORT)
    engine.check()
    assert (engine.reports.load().swapped_bytes, engine.reports.load().used_blocks) == (0, 0)


def choices(engine: Engine, before_step=None) -> dict[tuple[str, int], list[int]]:
    """Tokens by request and choice: of a single request that came first, and of a group of three that shares its
    prompt.
    """
    engine.add(request("old", PROMPTS[0], temperature=0.0))
    engine.add(msgspec.structs.replace(request("g", PROMPTS[1], temperature=1.0), group=Group(seeds=(5, 6, 7))))
    found: dict[tuple[str, int], list[int]] = {}
    while engine.scheduler.has_work:
        if before_step is not None:
            before_step()
        for output in engine.step().outputs:
            found.setdefault((output.request_id, output.choice), []).extend(output.token_ids)
        engine.check()
    return found


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_group_that_is_preempted_comes_back_with_the_same_tokens(make, mode):
    expected = choices(make(blocks=64))
    engine = make(blocks=15, mode=mode)
    assert choices(engine) == expected
    assert set(ways(engine)) == {mode} and ways(engine)[mode] >= 3
    assert (engine.reports.load().used_blocks, engine.reports.load().swapped_blocks) == (0, 0)
    assert not engine.scheduler.groups


def test_a_group_that_is_aborted_while_swapped_leaves_nothing(make):
    engine, aborted = make(blocks=15, mode="swap"), []

    def abort_once_swapped() -> None:
        if engine.scheduler.swapped and not aborted:
            assert engine.abort("g")
            aborted.append(len(engine.scheduler.sequences))

    tokens = choices(engine, abort_once_swapped)
    assert aborted == [1] and len(tokens["old", 0]) == 24
    assert (engine.reports.load().used_blocks, engine.reports.load().swapped_blocks, engine.scheduler.groups) == (
        0,
        0,
        {},
    )
