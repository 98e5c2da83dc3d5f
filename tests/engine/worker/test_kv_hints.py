"""Hints down to the tiers of a real engine: pins below the pool, prefetch ahead, tenants' shares, nothing kept."""

import pytest

from kvrelay.engine.worker.kv_exchange import prefetch
from kvrelay.hashing import block_hashes
from kvrelay.plane.messages import KvHints, Prefetch, Sampling, SequenceRequest
from tests.engine.step.test_engine_tiers import BLOCK, Driven, drive, folder, oracle, prompt_of  # noqa: F401


def others(it: Driven, count: int, **fields) -> None:
    """Prompts, each asked for often enough that any write policy saves it."""
    for seed in range(count):
        for _ in range(2):
            it.run(prompt_of(60, 100 + seed), f"other-{seed}", count=2, **fields)
    it.settle()


def ask(it: Driven, prompt, *, hold_s=30.0, name="p"):
    """What a prefetch is told."""
    request = SequenceRequest(
        request_id=name,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling=Sampling(max_tokens=1),
        block_hashes=list(block_hashes(prompt, BLOCK)),
    )
    told = []
    prefetch(it.engine, Prefetch(query_id=7, request=request, hold_s=hold_s), told.append)
    it.settle()
    [answer] = told
    return answer


@pytest.mark.parametrize("write", ["write-through", "selective"])
@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_pinned_prompt_is_found_below_the_pool_after_pressure(drive, oracle, write, is_pinned):  # noqa: F811
    it, prompt = drive(pool_blocks=20, host_blocks=24, write_policy=write), prompt_of(64)
    it.run(prompt, hints=KvHints(pin_s=600.0 if is_pinned else 0.0))
    it.settle()
    it.engine.pool.reset_cache()  # its pins end, too
    others(it, 4)
    tokens, cached = it.run(prompt, "again")
    assert tokens == oracle(prompt)
    assert cached == (56 if is_pinned else 0)


def test_an_ended_session_pins_nowhere(drive):  # noqa: F811
    it, prompt = drive(), prompt_of(64)
    it.run(prompt, hints=KvHints(pin_s=600.0, session="s"))
    it.settle()
    assert it.engine.pool.counts().pinned > 0
    assert it.tiers.host.counts().pinned > 0
    it.engine.requests.end_pins("s")
    it.engine.check()
    assert it.engine.pool.counts().pinned == 0
    assert it.tiers.host.counts().pinned == 0


def on_disk(drive, tmp_path, prompt):  # noqa: F811
    """An engine, just started, on whose disk the prompt lies."""
    options = {
        "disk_path": str(tmp_path / "kv"), "disk_size": "8MiB", "write_policy": "selective", "prefetch": "wait",
        "host_blocks": 24, "pool_blocks": 20,
    }  # fmt: skip
    first = drive(**options)
    for _ in range(3):
        first.run(prompt)
    first.settle()
    first.engine.close()
    return drive(**options)


def test_a_prefetched_prompt_is_in_the_host_tier_when_its_request_comes(drive, oracle, tmp_path):  # noqa: F811
    prompt = prompt_of(80)
    it = on_disk(drive, tmp_path, prompt)
    answer = ask(it, prompt)
    assert (answer.query_id, answer.problem, answer.pool_tokens, answer.host_tokens) == (7, "", 0, 0)
    assert answer.coming_tokens >= 64
    others(it, 3)
    loads = it.tiers.tier_loads()[1].loaded_blocks
    tokens, cached = it.run(prompt)
    assert tokens == oracle(prompt)
    assert cached >= 64
    assert it.tiers.tier_loads()[1].loaded_blocks == loads  # not once more from the disk


def test_a_prefetch_that_never_gets_its_request_leaves_nothing(drive, tmp_path):  # noqa: F811
    prompt = prompt_of(80)
    it = on_disk(drive, tmp_path, prompt)
    assert ask(it, prompt, hold_s=1e-6).coming_tokens >= 64
    counts = it.tiers.host.counts()
    assert (counts.held, counts.reserved) == (0, 0)
    others(it, 4)
    assert it.tiers.host.num_here(block_hashes(prompt, BLOCK), 0) == 0
    assert it.tiers.host.counts().pinned == 0
    assert it.engine.pool.counts().used == 0


def test_a_prefetch_tells_what_is_here_already_and_keeps_it(drive):  # noqa: F811
    it, prompt = drive(pool_blocks=40, host_blocks=24), prompt_of(64)
    it.run(prompt, count=1)
    it.settle()
    assert ask(it, prompt).pool_tokens == 64
    assert it.engine.pool.counts().pinned == 8
    it.engine.pool.reset_cache()
    answer = ask(it, prompt, name="q")
    assert (answer.pool_tokens, answer.host_tokens, answer.coming_tokens) == (0, 64, 0)
    assert it.tiers.host.counts().pinned == 8


@pytest.mark.parametrize(("prompt", "hold_s"), [([1000], 5.0), ([5] * 20, 0.0), ([5] * 20, float("inf"))])
def test_a_prefetch_that_makes_no_sense_is_refused(drive, prompt, hold_s):  # noqa: F811
    assert ask(drive(), prompt, hold_s=hold_s).problem == "invalid"


def test_a_tenant_has_its_share_of_the_host_tier_and_no_more(drive):  # noqa: F811
    it = drive(host_blocks=32, tenant_share=0.25)
    others(it, 3, salt="one")
    assert len(it.tiers.host) == 8
    others(it, 3)  # without a salt there is no share
    assert len(it.tiers.host) > 16


@pytest.mark.parametrize("write", ["write-through", "selective", "write-back"])
def test_what_is_not_to_be_kept_is_kept_nowhere(drive, tmp_path, write):  # noqa: F811
    it = drive(pool_blocks=20, host_blocks=24, write_policy=write, disk_path=str(tmp_path / "kv"), disk_size="8MiB")
    for seed in range(4):
        for _ in range(2):
            it.run(prompt_of(60, seed), hints=KvHints(keep=False, priority=8))
    it.settle()
    assert it.engine.pool.counts().cached == 0
    assert len(it.tiers.host) == 0
    assert it.tiers.tier_loads()[1].num_blocks == 0


def test_a_request_that_is_not_kept_does_not_have_others_blocks_saved(drive):  # noqa: F811
    """Under `selective` a match is a vote for saving; this request will not come again."""
    it, prompt = drive(write_policy="selective"), prompt_of(64)
    it.run(prompt)
    it.run(prompt, "once", hints=KvHints(keep=False))
    it.settle()
    assert len(it.tiers.host) == 0
    it.run(prompt, "again")
    it.settle()
    assert len(it.tiers.host) > 0
