"""What the steps of an engine cost on a GPU besides its kernels: waits, copies, launches, by kind of step."""

import gc

import pytest
import torch

from kvrelay.engine.execution import runner
from tests.fake_cuda import counters, engines

STALLS = ("device_waits", "stream_waits", "sync_copies", "pageable_to_device", "pageable_to_host")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: engines.folder_of(tmp_path_factory.mktemp("models"), name) for name in engines.CONFIGS}


@pytest.fixture(autouse=True)
def patched(monkeypatch):
    engines.patch(monkeypatch)


@pytest.fixture
def llama(folders):
    engine = engines.make(folders["llama"])
    yield engine
    engine.close()


def stalls(counts):
    return {name: counts[name] for name in STALLS if name in counts}


@pytest.mark.parametrize("num_sequences", [1, 5, 16])
def test_a_decode_step_is_one_graph_and_one_wait(llama, num_sequences):
    with engines.decoding(llama, num_sequences) as step:
        for counts in engines.counts_of(step):
            assert stalls(counts) == {} and counts["event_waits"] == 1 and counts["graph_launches"] == 1
            assert counts["kernels"] <= 8  # token feed, head and drawing: not captured


def test_random_drawing_does_not_wait_either(llama):
    with engines.decoding(llama, 4, temperature=0.8, top_p=0.9, top_k=50, seed=3) as step:
        for counts in engines.counts_of(step):
            assert stalls(counts) == {} and counts["event_waits"] == 1


def test_a_mixed_step_runs_in_pieces_and_waits_once(llama):
    num_layers = llama.model.spec.num_layers
    with engines.decoding(llama, 4) as step:
        engines.add_prompt(llama, 700)
        for counts in engines.counts_of(step):
            assert (
                stalls(counts) == {}
                and counts.get("event_waits", 0) <= 1
                and counts["graph_launches"] == num_layers + 1
            )


def test_a_prompt_alone_does_not_wait(llama):
    engines.add_prompt(llama, 700)
    for counts in engines.counts_of(llama.step):
        assert stalls(counts) == {} and counts.get("event_waits", 0) <= 1


def test_the_counters_see_a_step_that_waits(llama, monkeypatch):
    """The control: as rows of a step's hidden states were chosen before."""
    monkeypatch.setattr(runner, "to_device", lambda x, device: torch.tensor(x.tolist(), device=device))
    with engines.decoding(llama, 4) as step:
        engines.add_prompt(llama, 700)
        assert any(stalls(counts) for counts in engines.counts_of(step))


def test_all_work_is_on_the_engines_own_device(folders):
    gc.collect()  # what earlier engines leave is freed now
    before = counters.read(0)
    engine = engines.make(folders["llama"], "cuda:1")
    with engines.decoding(engine, 4) as step:
        engines.add_prompt(engine, 700)
        counts = engines.counts_of(step, device=1)
    engine.close()
    assert all(found["kernels"] and not stalls(found) for found in counts)
    after = counters.read(0)
    busy = ("kernels", "side_kernels", "graph_launches", "events", "pinned_to_device", "pinned_to_host")
    assert {name: after[name] - before[name] for name in busy} == dict.fromkeys(busy, 0)


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek"])
def test_experts_and_latent_attention_run_in_graphs_with_one_wait(folders, name):
    engine = engines.make(folders[name])
    with engines.decoding(engine, 4) as step:
        for counts in engines.counts_of(step):
            assert stalls(counts) == {} and counts["event_waits"] == counts["graph_launches"] == 1
        engines.add_prompt(engine, 700)
        for counts in engines.counts_of(step):
            assert stalls(counts) == {} and counts.get("event_waits", 0) <= 1
            assert counts["graph_launches"] == engine.model.spec.num_layers + 1
    engine.close()


def test_log_probabilities_of_one_row_stall_no_step(llama):
    with engines.decoding(llama, 4, logprobs=3) as step:
        for counts in engines.counts_of(step):
            assert stalls(counts) == {} and counts.get("event_waits", 0) <= 1


def test_penalties_and_drafts_wait_for_the_tokens_alone(llama):
    """They are drawn when the tokens before them are known: no look-ahead, and still no pageable copy."""
    with engines.decoding(llama, 4, presence_penalty=0.5, logprobs=2) as step:
        for counts in engines.counts_of(step):
            assert stalls(counts) == {} and counts["event_waits"] <= 2
