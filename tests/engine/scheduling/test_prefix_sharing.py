"""Prompts that begin alike and are in line together: the second finds what the first computes, where that is worth a
step.
"""

import msgspec
import pytest

from kvrelay.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from kvrelay.hashing import block_hashes
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.plane.messages import KvHints, Sampling, SequenceRequest

pytestmark = pytest.mark.pure


BLOCK = 4


def request(name, ids, *, salt="", **fields):
    given = {"sampling": Sampling(max_tokens=8)} | fields
    return SequenceRequest(
        request_id=name,
        token_ids=ids,
        num_prompt_tokens=len(ids),
        salt=salt,
        block_hashes=list(block_hashes(ids, BLOCK, salt)),
        **given,
    )


def scheduler(*requests, budget=64, **pool):
    made = Scheduler(BlockPool(64, block_size=BLOCK, **pool), SchedulerConfig(budget, 8, 8))
    for one in requests:
        made.add(one, 0.0)
    return made


def step(sched):
    """What is computed in it: (request, first token, tokens)."""
    plan = sched.schedule()
    for item in plan.work:
        samples = item.samples
        sched.advance(item)
        if samples:
            item.seq.token_ids.append(99)
    return [(item.seq.request_id, item.start, item.num_tokens) for item in plan.work if item.num_tokens > 1]


SHARED = list(range(20))
FIRST, SECOND = [*SHARED, 30, 31], [*SHARED, 40, 41, 42]


def test_the_second_of_two_that_come_together_finds_what_the_first_computes():
    sched = scheduler(request("a", FIRST), request("b", SECOND))
    assert step(sched) == [("a", 0, 22)]
    assert step(sched) == [("b", 20, 3)]
    assert sched.sequences["b"].num_cached == 20
    sched.check()


def test_a_crowd_waits_one_step_in_all():
    sched = scheduler(*(request(f"r{n}", [*SHARED, 50 + n, 60]) for n in range(4)))
    assert [len(step(sched)), len(step(sched))] == [1, 3]


def test_prompts_that_are_not_alike_share_the_step():
    sched = scheduler(request("a", FIRST), request("b", [7, *SECOND]))
    assert [name for name, _, _ in step(sched)] == ["a", "b"]


def test_of_a_long_prompt_each_chunk_is_waited_for_as_long_as_it_computes_what_is_shared():
    ids = list(range(100, 130))
    sched = scheduler(request("a", [*ids, *range(200, 215)]), request("b", [*ids, 7, 8]), budget=24)
    assert step(sched) == [("a", 0, 24)]
    assert step(sched) == [("a", 24, 21)]  # 3 tokens would be left, but block 6 is shared and not there yet
    assert step(sched) == [("b", 28, 4)]


@pytest.mark.parametrize(
    ("other", "fields"),
    [
        (SECOND, {"salt": "another tenant's"}),
        (SECOND, {"sampling": Sampling(max_tokens=8, prompt_logprobs=0)}),  # every token is to be computed
        (SHARED[:3] + [9] * 10, {}),  # no whole block is alike
    ],
)
def test_what_would_find_nothing_does_not_wait(other, fields):
    sched = scheduler(request("a", FIRST), request("b", other, **fields))
    assert [name for name, _, _ in step(sched)] == ["a", "b"]


def test_what_will_not_be_named_is_not_waited_for():
    one, other = request("a", FIRST), request("b", SECOND)
    for sched in (
        scheduler(one, other, prefix_caching=False),
        scheduler(msgspec.structs.replace(one, hints=KvHints(keep=False)), other),
    ):
        assert [name for name, _, _ in step(sched)] == ["a", "b"]


def test_a_little_is_not_worth_a_step():
    """Of a step of 640 tokens, fewer than 20 are sooner computed than waited for."""
    sched = scheduler(request("a", FIRST), request("b", [*SHARED[:16], 1, 2]), budget=640)
    assert [name for name, _, _ in step(sched)] == ["a", "b"]
    sched = scheduler(request("a", FIRST), request("b", SECOND), budget=640)
    assert [name for name, _, _ in step(sched)] == ["a"]


def test_what_is_cached_already_is_no_reason_to_wait():
    sched = scheduler(request("a", FIRST))
    step(sched)
    sched.add(request("b", SECOND), 0.0)
    sched.add(request("c", [*SHARED, 70]), 0.0)
    assert [name for name, _, _ in step(sched)] == ["b"]  # c has one token to compute: beside it
    assert sched.sequences["c"].num_computed == 21


def test_the_order_of_the_queue_stays():
    """Who comes after does not pass: first come, first served holds."""
    sched = scheduler(request("a", FIRST), request("b", SECOND), request("c", [7, 8, 9]))
    assert [name for name, _, _ in step(sched)] == ["a"]
    assert [name for name, _, _ in step(sched)] == ["b", "c"]
