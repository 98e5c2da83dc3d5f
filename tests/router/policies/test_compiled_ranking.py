"""joint's ranking in C and in Python: the same bits for the same request. And all policies' placements as recorded:
those of numpy's code, but for joint's pressure and stall, which have changed since.
"""

import random
from dataclasses import replace
from hashlib import blake2b

import numpy as np
import pytest

from kvrelay.plane.reports import KvSnapshot, LoadReport
from kvrelay.router.decision.router import Router
from kvrelay.router.policies.base import CostModel, RoutingContext
from kvrelay.router.policies.joint import Joint, PlainRanking, compiled
from kvrelay.router.policies.selection import POLICIES
from kvrelay.router.types import Decision, RouteRequest, SloRequirement, SloTarget
from kvrelay.settings.router import RouterSettings
from tests.router.decision.test_placement_rules import BLOCK, chain, info
from tests.router.policies.policy_cases import side

pytestmark = pytest.mark.pure

LOADS = ("random", "equal", "skewed")
RANKED = "54c0eda42094ef80"
"""The rows of all candidates of 4,000 requests."""
DECIDED = {
    "joint": ["fac63196d36794ec", "8c856f9241914337", "3555cfa5ef9754ec"],
    "round_robin": ["fdcf794af6c2a748", "9819e6e4c62d679d", "49bf4f75b0bc5712"],
    "least_loaded": ["14e03512466c15d7", "b280d9aa7d1869ce", "7e9d08c6e95b261a"],
    "power_of_two": ["b690b6b2d8eee3ad", "60f1b11bd05c4bdc", "e59cb0b1478ddedb"],
    "prefix_affinity": ["6da4716a976f9122", "70495e7da93a6f07", "9f297c21a43af8d7"],
    "session": ["3444b23bf6a86590", "8c610f5382e645ef", "b3c0291af78f0bcd"],
}
"""By policy: what a router decided under each of LOADS."""


@pytest.fixture(autouse=True)
def needs_a_compiler():
    if compiled() is None:
        pytest.skip("no compiler")


def workers(rng, load, most, num_tokens):
    """A table: all as busy, or a few of them, or each differently; blocks held, in the pool and below it."""
    count = rng.choice((0, 1, 2, 5, 6, 7, most))
    size = rng.choice((BLOCK, BLOCK, 64))

    def column(low, high):
        if load == "equal":
            return [(low + high) // 2] * count
        return [rng.randint(low, high) if load == "random" or not row % 8 else low for row in range(count)]

    def tokens(share):
        blocks = [rng.randint(1, max(num_tokens // size, 1)) if rng.random() < share else 0 for _ in range(count)]
        return np.array([size * one for one in blocks], np.int64)

    held = tokens(rng.choice((0, 0.2)))
    expected = np.maximum(held, tokens(rng.choice((0, 0.1))))
    return side(
        count,
        held=held,
        expected=expected,
        in_any_tier=np.maximum(expected, tokens(rng.choice((0, 0.3)))),
        nodes=column(0, rng.choice((0, 3))),
        queued_tokens=column(0, 9000),
        queued_requests=column(0, 4),
        sequences=column(0, 64),
        waiting=column(0, 6),
        free_blocks=column(0, 1000),
        turn=[rng.randint(0, 9) for _ in range(count)],
        block_size=[size] * count if rng.random() < 0.9 else [rng.choice((BLOCK, size)) for _ in range(count)],
        kv_bytes_per_token=column(1, 99_999),
        prefill_tokens_per_s=[float(one) for one in column(500, 9000)],
        decode_step_s=[one / 1000 for one in column(10, 60)],
        recent_step_s=[one / 1000 for one in column(10, 140)],
        age_s=[float("inf") if one == 9 else one / 100 for one in column(0, 9)],
        output_tokens=[float(one) for one in column(0, 900)],
    )


def case(rng, most=24):
    """A request in its context, and the tables of both roles."""
    load, num_tokens = rng.choice(LOADS), rng.choice((1, 40, 160, 1000, 30_000))
    request = RouteRequest(
        "r",
        (),
        num_tokens,
        rng.choice((1, 64, 4000)),
        needs_decode=rng.random() < 0.9,
        force=rng.choice((None, None, None, "local", "remote")),
        width=rng.choice((1, 1, 4)),
        slo=rng.choice((None, None, SloRequirement((SloTarget("fast", 0.5, 0.03),)))),
    )
    context = RoutingContext(
        request,
        rng.random(),
        now_s=0.0,
        unreported_share=rng.choice((0.0, 0.4)),
        arrivals_per_s=rng.choice((0.0, 0.5, 90.0)),
        tenant_excess=rng.choice((0.0, 0.7, 9.0)),
        stored_tokens=rng.choice((0, 0, num_tokens // 2)),
    )
    return context, workers(rng, load, most, num_tokens), workers(rng, load, most, num_tokens)


MODELS = (CostModel(), CostModel(local_prefill_tokens=0, tier_bytes_per_s=1e7, missed_s=1.0))


@pytest.mark.parametrize(("seed", "num_cases", "most"), [(1, 1000, 24), (2, 5, 700)])
def test_c_and_python_rank_to_the_same_bits(seed, num_cases, most):
    rng, num_ranked = random.Random(seed), 0
    for number in range(num_cases):
        context, prefills, decodes = case(rng, most)
        model = MODELS[number % 2]
        decoding = [rng.random() < number % 3 / 2 for _ in prefills.names]
        late = np.array([rng.choice((0, 0, 7000)) for _ in prefills.names], np.int64)
        prefills = replace(prefills, decodes=np.array(decoding, np.int64), overdue_tokens=late)
        plain = PlainRanking(context, prefills, decodes, model).candidates()
        assert repr(Joint({}, model).rank(context, prefills, decodes)) == repr(plain)
        num_ranked += bool(plain)
    assert num_ranked > num_cases // 2


def digest(placements):
    return blake2b(repr(placements).encode(), digest_size=8).hexdigest()


def test_placements_are_those_recorded():
    rng, policy = random.Random(3), Joint({})
    ranked = [policy.rank(*case(rng)) for _ in range(4000)]
    assert digest([[one[:2] for one in candidates] for candidates in ranked]) == RANKED


def decided_by(policy, load, num_requests=250):
    """What a router decides in a cluster where requests come, get their first token and end."""
    rng = random.Random(f"{policy}/{load}")
    router = Router(RouterSettings(policy=policy), tokens_per_hash=BLOCK, has_store=load == "random")
    prompts = [chain(f"system{i}", 8) + chain(f"own{i}", 40) for i in range(12)]
    for i in range(40):
        name, role = f"w{i:02}", ("prefill", "decode", "both")[i % (3 if load == "random" else 2)]
        router.worker_up(info(name, role, node=f"n{i % 4}"))
        held = [one for prompt in rng.sample(prompts, 2) for one in prompt[: rng.randrange(48)]]
        router.apply_snapshot(name, KvSnapshot(seq=0, hashes=list(dict.fromkeys(held))))
        busy = {"random": rng.randrange(9), "equal": 4, "skewed": 8 * (i % 8 < 2)}[load]
        report = LoadReport(seq=1, running=busy, queued_tokens=500 * busy, free_blocks=900, total_blocks=1000)
        router.apply_load(name, report, 0.0)
    decided = []
    for i in range(num_requests):
        prompt = rng.choice(prompts)[: rng.randrange(49)] + chain(f"new{i}", rng.randrange(12))
        request = RouteRequest(f"r{i}", prompt, len(prompt) * BLOCK + 5, 64, session=f"s{i % 5}", width=1 + i % 2)
        choice = router.select_and_reserve(request, 0.02 * i)
        assert isinstance(choice, Decision)
        tokens = choice.cached_tokens_prefill, choice.loaded_tokens_prefill, choice.cached_tokens_decode
        decided.append((choice.prefill, choice.decode, choice.path, *tokens, choice.regret.tokens))
        if i >= 9:
            router.on_first_token(f"r{i - 9}", 0.02 * i)
        if i >= 60:
            router.on_end(f"r{i - 60}")
    return digest(decided)


@pytest.mark.parametrize("policy", POLICIES)
def test_routers_decide_as_recorded(policy):
    assert [decided_by(policy, load) for load in LOADS] == DECIDED[policy]
