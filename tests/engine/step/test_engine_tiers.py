"""KV that sank below an engine's pool and came back gives the same tokens; what rotted there is computed anew."""

import threading
import time

import pytest
import torch

from kvrelay.engine.step.build import load_engine
from kvrelay.engine.step.config import EngineConfig, Extensions
from kvrelay.engine.worker.build import make_lower_tiers
from kvrelay.hashing import block_hashes, root_hash
from kvrelay.kernels.select import select_backend
from kvrelay.kvcache.stores.namespace import namespace_of
from kvrelay.plane.messages import KvHints, Sampling, SequenceRequest
from kvrelay.settings.cache import CacheSettings
from tests.engine.tiny import greedy_oracle, tiny_llama

VOCAB, BLOCK = 97, 8
BLOCK_BYTES = BLOCK * 3 * 2 * 2 * 16 * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def oracle(folder):
    return greedy_oracle(folder)


class Driven:
    """An engine with tiers, stepped by hand."""

    def __init__(
        self, folder, tmp_path, *, pool_blocks=24, host_blocks=64, checks="full", hook=None, secret=b"", **cache
    ):
        config = EngineConfig(block_size=BLOCK, kv_memory_bytes=pool_blocks * BLOCK_BYTES, token_budget=24)
        backend = select_backend("cpu", "cpu", 1)
        self.woken = threading.Semaphore(0)
        settings = CacheSettings(host_memory=host_blocks * BLOCK_BYTES, **cache)

        def lower_tiers(kv):
            namespace = namespace_of(kv.fingerprint, kv.memory.layout)
            wake = self.woken.release
            return make_lower_tiers(kv.pool, kv.memory, settings, checks, namespace, wake, secret=secret)

        extensions = Extensions(lower_tiers, layer_hook=hook)
        self.engine = load_engine(folder, backend, torch.float32, config, extensions)

    @property
    def tiers(self):
        return self.engine.tiers.controller

    def run(self, prompt, name="r", *, count=10, **fields):
        """(tokens, cached tokens) of one request."""
        sampling = Sampling(max_tokens=count, temperature=0.0, ignore_eos=True)
        request = SequenceRequest(
            request_id=name,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=sampling,
            block_hashes=list(block_hashes(prompt, BLOCK, fields.get("salt", ""))),
            **fields,
        )
        assert self.engine.requests.refusal(request) is None
        self.engine.add(request)
        tokens, cached = [], 0
        deadline = time.monotonic() + 30
        while self.engine.scheduler.has_work:
            result = self.engine.step()
            self.engine.check()
            for output in result.outputs:
                tokens += output.token_ids
                cached = output.cached_tokens or cached
            if result.is_stuck:
                self.woken.acquire(timeout=0.05)
            assert time.monotonic() < deadline
        return tokens, cached

    def settle(self):
        while not self.tiers.is_idle:
            self.woken.acquire(timeout=0.05)
            self.tiers.poll()
        self.tiers.poll()
        self.engine.check()

    def forget_pool(self):
        """Cached blocks of the pool alone are gone."""
        self.settle()
        self.engine.pool.reset_cache()


@pytest.fixture
def drive(folder, tmp_path):
    made = []

    def make(**options):
        made.append(Driven(folder, tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.engine.close()
        one.engine.check()


def prompt_of(length, seed=0):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed + length)).tolist()


@pytest.mark.parametrize("length", [BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 3, 100])
def test_a_prompt_found_in_the_host_tier_gives_the_same_tokens(drive, oracle, length):
    it, prompt = drive(), prompt_of(length)
    expected = oracle(prompt)
    assert it.run(prompt) == (expected, 0)
    it.forget_pool()
    tokens, cached = it.run(prompt)
    assert tokens == expected
    assert cached == (length - 1) // BLOCK * BLOCK
    assert it.engine.reports.load().tier_hit_tokens == cached


def test_half_in_the_pool_and_half_below(drive, oracle):
    it, prompt = drive(), prompt_of(96)
    it.run(prompt)
    it.forget_pool()
    it.run(prompt[:40])
    tokens, cached = it.run(prompt)
    assert tokens == oracle(prompt)
    assert cached == 88


def test_what_rotted_in_the_host_tier_is_computed_anew(drive, oracle):
    it, prompt = drive(), prompt_of(64)
    it.run(prompt)
    it.forget_pool()
    digest = block_hashes(prompt, BLOCK)[2]
    it.tiers.host.slab.row(it.tiers.host.row(digest))[100] ^= 64
    tokens, _ = it.run(prompt)
    assert tokens == oracle(prompt)
    assert it.tiers.stats.corrupt == 1


def test_with_checks_off_rot_changes_the_answer(drive, oracle):
    """The test above can fail."""
    it, prompt = drive(checks="off"), prompt_of(64)
    it.run(prompt)
    it.forget_pool()
    for digest in block_hashes(prompt, BLOCK)[:4]:
        slot = it.tiers.host.slab.row(it.tiers.host.row(digest))
        slot[:] = bytes(len(slot))
    assert it.run(prompt)[0] != oracle(prompt)


@pytest.mark.parametrize("write", ["write-through", "selective", "write-back"])
def test_each_write_policy_under_pressure_gives_the_same_tokens(drive, oracle, write):
    it = drive(pool_blocks=20, write_policy=write)
    prompts = [prompt_of(60 + seed, seed) for seed in range(6)]
    for _ in range(2):
        for prompt in prompts:
            assert it.run(prompt)[0] == it.run(prompt)[0] == oracle(prompt)
    it.settle()
    assert it.tiers.stats.saved > 0


def test_selective_saves_what_was_matched_and_nothing_else(drive):
    it = drive(write_policy="selective")
    once, twice = prompt_of(48, 1), prompt_of(48, 2)
    it.run(once)
    it.run(twice)
    it.settle()
    assert len(it.tiers.host) == 0
    it.run(twice)
    it.settle()
    saved = set(it.tiers.host.hashes())
    assert saved
    assert saved <= set(block_hashes(twice, BLOCK))


@pytest.mark.parametrize("secret", [b"", b"the cluster's"], ids=["plain", "sealed"])
def test_a_prompt_on_disk_is_found_after_a_restart(drive, oracle, tmp_path, secret):
    options = {"disk_path": str(tmp_path / "kv"), "disk_size": "8MiB", "write_policy": "selective", "prefetch": "wait"}
    options |= {"secret": secret, "sealed": bool(secret)}
    first, prompt = drive(**options), prompt_of(80)
    for _ in range(3):
        first.run(prompt, salt="tenant")
    first.settle()
    first.engine.close()
    second = drive(**options)
    tokens, cached = second.run(prompt, salt="tenant")
    assert tokens == oracle(prompt)
    assert cached >= 64


def test_what_the_pool_would_evict_is_described_as_what_was_written_through(drive):
    """A block that sinks is opened with what its prompt's next request says of it."""
    it, prompt = drive(), prompt_of(64)
    it.run(prompt, salt="tenant")
    it.settle()
    evicted = {block.digest: block.meta for block in it.engine.pool.eviction_candidates(9)}
    written = {digest: it.tiers.host.entry(it.tiers.host.row(digest))[0] for digest in it.tiers.host.hashes()}
    assert evicted == written and {meta.root for meta in written.values()} == {root_hash("tenant")}


def test_a_prompt_sealed_with_another_secret_is_computed(drive, oracle, tmp_path):
    options = {"disk_path": str(tmp_path / "kv"), "disk_size": "8MiB", "write_policy": "selective", "prefetch": "wait"}
    first, prompt = drive(sealed=True, secret=b"one", **options), prompt_of(80)
    for _ in range(3):
        first.run(prompt)
    first.settle()
    first.engine.close()
    assert drive(sealed=True, secret=b"another", **options).run(prompt) == (oracle(prompt), 0)


def test_a_prompt_nobody_will_ask_for_again_leaves_nothing_below(drive):
    it, prompt = drive(), prompt_of(64)
    it.run(prompt, hints=KvHints(keep=False))
    it.settle()
    assert len(it.tiers.host) == 0


def test_tenants_do_not_share_what_lies_below(drive, oracle):
    it, prompt = drive(), prompt_of(64)
    it.run(prompt, salt="one")
    it.forget_pool()
    assert it.run(prompt, salt="two") == (oracle(prompt), 0)
    it.forget_pool()
    assert it.run(prompt, salt="one")[1] == 56


def test_layers_that_come_up_are_announced_for_the_transfer_like_computed_ones(drive):
    seen = []
    it, prompt = (
        drive(hook=lambda name, first, blocks, layers: seen.append((name, first, len(blocks), layers))),
        prompt_of(64),
    )
    it.run(prompt)
    it.forget_pool()
    sampling = Sampling(max_tokens=10, temperature=0.0, ignore_eos=True)
    request = SequenceRequest(
        request_id="held",
        token_ids=prompt,
        num_prompt_tokens=64,
        sampling=sampling,
        block_hashes=list(block_hashes(prompt, BLOCK)),
    )
    it.engine.add(request, hold=True, output_limit=1)
    while not it.engine.scheduler.held:
        it.engine.step()
    covered = {
        (layer, index) for _, first, count, layers in seen for layer in layers for index in range(first, first + count)
    }
    assert covered == {(layer, index) for layer in range(3) for index in range(8)}
    it.engine.abort("held")


def test_blocks_from_below_are_not_named_before_they_are_known_to_be_whole(drive, oracle):
    """A decode worker's: the rest of the prompt has come over the network, what came from below is rotten."""
    it, prompt = drive(), prompt_of(64)
    it.run(prompt)
    it.forget_pool()
    hashes = block_hashes(prompt, BLOCK)
    it.tiers.host.slab.row(it.tiers.host.row(hashes[2]))[100] ^= 64
    sampling = Sampling(max_tokens=10, temperature=0.0, ignore_eos=True)
    request = SequenceRequest(
        request_id="reserved", token_ids=prompt, num_prompt_tokens=64, sampling=sampling, block_hashes=list(hashes)
    )
    it.engine.reserve(request)
    assert it.engine.step().reservations[0].held_tokens == 64
    assert it.engine.requests.activate("reserved", [oracle(prompt)[0]])
    assert it.engine.pool.cached_hashes() == []
    tokens = []
    while it.engine.scheduler.has_work:
        result = it.engine.step()
        it.engine.check()
        tokens += [token for output in result.outputs for token in output.token_ids]
        if result.is_stuck:
            it.woken.acquire(timeout=0.05)
    assert tokens == oracle(prompt)[1:]
    assert it.run(prompt)[0] == oracle(prompt)


def test_an_abort_while_blocks_come_up_frees_them(drive):
    it, prompt = drive(), prompt_of(64)
    it.run(prompt)
    it.forget_pool()
    sampling = Sampling(max_tokens=10, temperature=0.0, ignore_eos=True)
    request = SequenceRequest(
        request_id="reserved",
        token_ids=prompt,
        num_prompt_tokens=64,
        sampling=sampling,
        block_hashes=list(block_hashes(prompt, BLOCK)),
    )
    it.engine.reserve(request)
    result = it.engine.step()
    assert result.reservations[0].held_tokens == 64
    it.engine.abort("reserved")
    it.settle()
    assert it.engine.pool.counts().used == 0
    assert it.tiers.host.counts().held == 0
