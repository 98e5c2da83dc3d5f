"""Workers, requests and checks for the tests of routing policies."""

import math
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.plane.reports import KvEvents
from kvrelay.router.policies.base import MAX_CANDIDATES, RoutingContext, WorkerTable
from kvrelay.router.types import Decision, RouteRequest
from tests.router.decision.test_placement_rules import chain, cluster

BLOCK = 16

DEFAULTS = {
    "nodes": 0,
    "held": 0,
    "expected": 0,
    "in_any_tier": 0,
    "queued_tokens": 0,
    "queued_requests": 0,
    "overdue_tokens": 0,
    "sequences": 0,
    "waiting": 0,
    "free_blocks": 1000,
    "num_blocks": 1000,
    "block_size": BLOCK,
    "prefill_tokens_per_s": 1000.0,
    "decode_step_s": 0.02,
    "recent_step_s": 0.02,
    "kv_bytes_per_s": 1e9,
    "kv_bytes_per_token": 1000,
    "decodes": 0,
    "turn": 0,
    "age_s": 0.0,
    "output_tokens": 0.0,
}


def side(count=None, *, prefix="w", **columns):
    """A side; columns left out are idle workers with empty caches. What a worker holds, it also holds further down."""
    if "held" in columns:
        columns.setdefault("expected", columns["held"])
        columns.setdefault("in_any_tier", columns["held"])
    count = count if count is not None else len(next(iter(columns.values())))
    arrays = {}
    for name, default in DEFAULTS.items():
        kind = np.int64 if isinstance(default, int) else np.float64
        arrays[name] = np.array(columns.pop(name, [default] * count), dtype=kind)
        arrays[name].flags.writeable = False
    assert not columns
    return WorkerTable(names=tuple(f"{prefix}{row}" for row in range(count)), **arrays)


def ask(tokens=160, *, draw=0.5, stored=0, **rest):
    request = RouteRequest(request_id="r1", block_hashes=(), num_tokens=tokens, max_tokens=64, **rest)
    return RoutingContext(request, draw, now_s=0.0, stored_tokens=stored)


def best(policy, prefills, decodes=None, **rest):
    return policy.rank(ask(**rest), prefills, side(1) if decodes is None else decodes)[0]


def prefill_of(policy, prefills, **rest):
    return best(policy, prefills, **rest).prefill


def decode_of(policy, decodes, **rest):
    return best(policy, side(1), decodes, **rest).decode


def parts_of(policy, way):
    return dict(zip(policy.term_names, way.parts, strict=True))


STRICT = settings(max_examples=25, deadline=None)


@st.composite
def sides(draw, least=0, most=24):
    count = draw(st.integers(least, most))

    def column(low, high):
        return draw(st.lists(st.integers(low, high), min_size=count, max_size=count))

    held = np.array(column(0, 10), dtype=np.int64)
    expected, in_any_tier = held + column(0, 3), held + column(0, 3)
    columns = {"held": held, "expected": expected, "in_any_tier": in_any_tier}
    return side(
        count,
        **{name: np.minimum(blocks, 10) * BLOCK for name, blocks in columns.items()},
        nodes=column(0, 2),
        queued_tokens=column(0, 5000),
        sequences=column(0, 200),
        waiting=column(0, 20),
        free_blocks=column(1, 1000),
        turn=column(0, 50),
        prefill_tokens_per_s=column(1, 9000),
        kv_bytes_per_token=column(1, 99999),
    )


asks = st.builds(
    ask,
    st.integers(160, 400),
    draw=st.floats(0, 1, exclude_max=True),
    stored=st.sampled_from([0, 80, 160]),
    needs_decode=st.booleans(),
    force=st.sampled_from([None, "local", "remote"]),
    session=st.sampled_from(["", "s"]),
)


def check_contract(policy, request, prefills, decodes):
    """What base.Policy asks for."""
    candidates = policy.rank(request, prefills, decodes)
    assert candidates == policy.rank(request, prefills, decodes), "a decision can be told again"
    assert len(candidates) <= MAX_CANDIDATES
    assert len({(way.prefill, way.decode) for way in candidates}) == len(candidates)
    assert all(one.score <= other.score for one, other in pairwise(candidates))
    for way in candidates:
        assert len(way.parts) == len(policy.term_names)
        assert math.isfinite(way.score) and all(map(math.isfinite, way.parts))
        assert way.prefill is None or 0 <= way.prefill < len(prefills)
        assert way.decode is None or 0 <= way.decode < len(decodes)
    force, needs_decode = request.request.force, request.request.needs_decode
    if force == "local" or (not len(prefills) and force is None):
        assert all(way.prefill is None and way.decode is not None for way in candidates)
        assert bool(candidates) == bool(len(decodes))
    elif not needs_decode:
        assert all(way.prefill is not None and way.decode is None for way in candidates)
        assert bool(candidates) == bool(len(prefills))
    else:
        assert all(way.decode is not None for way in candidates)
        assert force != "remote" or all(way.prefill is not None for way in candidates)
        assert bool(candidates) == bool(len(prefills) and len(decodes))


def permuted(one, order):
    columns = {field.name: getattr(one, field.name)[order] for field in fields(one) if field.name != "names"}
    return WorkerTable(names=tuple(one.names[row] for row in order), **columns)


def check_order(policy, request, workers, order):
    """The best score stays, and so does who has it, unless others have it too."""
    candidates, again = policy.rank(request, workers, side(1)), policy.rank(request, permuted(workers, order), side(1))
    assert again[0].score == pytest.approx(candidates[0].score)
    if sum(way.score == pytest.approx(candidates[0].score) for way in candidates) == 1:
        assert order[again[0].prefill] == candidates[0].prefill


def with_a_better_one(workers, row):
    """`row` idle, never chosen, holding the whole prompt; all others worse in everything."""
    better = np.zeros(len(workers), dtype=bool)
    better[row] = True
    return replace(
        workers,
        held=np.where(better, 160, np.minimum(workers.held, 96)),
        expected=np.where(better, 160, np.minimum(workers.expected, 96)),
        in_any_tier=np.where(better, 160, np.minimum(workers.in_any_tier, 96)),
        queued_tokens=np.where(better, 0, workers.queued_tokens + 200),
        sequences=np.where(better, 0, workers.sequences + 1),
        waiting=np.where(better, 0, workers.waiting + 1),
        free_blocks=np.where(better, 1000, np.minimum(workers.free_blocks, 900)),
        turn=np.where(better, 0, workers.turn + 1),
        prefill_tokens_per_s=np.full(len(workers), 1000.0),
        kv_bytes_per_token=np.full(len(workers), 10**6),
    )


def check_keeps_the_contract(policy):
    @STRICT
    @given(asks, sides(), sides())
    def holds(request, prefills, decodes):
        check_contract(policy, request, prefills, decodes)

    holds()


def check_row_order_decides_between_equals_only(policy):
    @STRICT
    @given(st.data())
    def holds(data):
        workers = data.draw(sides(least=1, most=14))
        order = np.array(data.draw(st.permutations(range(len(workers)))))
        check_order(policy, ask(force="remote"), workers, order)

    holds()


def check_a_better_worker_wins(policy, role):
    @STRICT
    @given(st.data())
    def holds(data):
        workers = data.draw(sides(least=1))
        row = data.draw(st.integers(0, len(workers) - 1))
        better = with_a_better_one(workers, row)
        request = ask(200, draw=data.draw(st.floats(0, 1, exclude_max=True)))
        if role == "prefill":
            assert policy.rank(request, better, side(1))[0].prefill == row
        else:
            assert policy.rank(request, side(1), better)[0].decode == row

    holds()


def check_serves_through_the_router(setting, policy):
    router, served = cluster(["p0", "p1", "p2"], ["d0", "d1", "d2"], policy=setting), []
    for number in range(30):
        prompt = chain(f"s{number % 4}", 8 + number)
        request = RouteRequest(f"r{number}", prompt, len(prompt) * BLOCK, max_tokens=64, session=f"s{number % 4}")
        decision = router.select_and_reserve(request, now_s=float(number))
        assert isinstance(decision, Decision)
        assert (decision.policy, tuple(decision.policy_terms)) == (policy.name, policy.term_names)
        computing = decision.prefill or decision.decode
        served.append(computing)
        router.apply_events(computing, KvEvents(seq=served.count(computing), stored=list(prompt), removed=[]))
        router.on_first_token(request.request_id, number + 0.5)
        if number > 5:
            router.on_end(f"r{number - 5}")
    assert len(set(served)) > 1
