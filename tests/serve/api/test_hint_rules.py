"""Hints about KV: what a request inherits from its session, which sessions there are, whose pins end with one."""

import pytest

from kvrelay.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from kvrelay.engine.scheduling.tier_requests import Pinning
from kvrelay.hashing import HashChain, block_hashes
from kvrelay.kvcache.index.pins import PinRecord, PinRecords
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.plane.messages import KvHints, Sampling, SequenceRequest
from kvrelay.serve.api.parameters import merged_hints
from kvrelay.serve.api.schemas import KvFields
from kvrelay.serve.api.sessions import IDLE_S, MAX_SESSIONS, MAX_TENANT_SESSIONS, SessionHints, SessionKey, SessionTable

pytestmark = pytest.mark.pure


BLOCK = 4


@pytest.mark.parametrize(
    ("own", "session", "expected"),
    [
        ({}, SessionHints(), KvHints(session="s")),
        ({}, SessionHints(priority=3, pin_s=60.0), KvHints(priority=3, pin_s=60.0, session="s")),
        ({"priority": 0, "pin_s": 0}, SessionHints(priority=3, pin_s=60.0), KvHints(session="s")),
        ({"priority": -1}, SessionHints(priority=3, pin_s=60.0), KvHints(priority=-1, pin_s=60.0, session="s")),
        ({"keep": False}, SessionHints(pin_s=60.0), KvHints(keep=False, session="s")),
        ({"keep": True}, SessionHints(keep=False), KvHints(session="s")),
        ({"pin_s": 5}, SessionHints(keep=False), KvHints(keep=False, session="s")),
    ],
)
def test_a_requests_own_fields_win_over_its_sessions(own, session, expected):
    assert merged_hints(KvFields(**own), session, "s") == expected


def test_sessions_of_two_salts_have_nothing_in_common():
    table, one, two = SessionTable(), SessionKey.of("one", "chat"), SessionKey.of("two", "chat")
    table.put(one, SessionHints(priority=1), 0.0)
    assert table.get(two, 0.0) is None
    assert table.delete(two) is None
    assert table.get(one, 0.0) == SessionHints(priority=1)
    assert "one" not in str(one)


def test_a_session_is_forgotten_when_idle_and_every_use_counts():
    table, key = SessionTable(), SessionKey.of("", "chat")
    table.put(key, SessionHints(), 0.0)
    assert table.get(key, IDLE_S - 1) is not None
    assert table.get(key, 2 * IDLE_S - 2) is not None
    assert table.get(key, 3 * IDLE_S - 2) is None
    assert len(table) == 0


def test_a_replaced_session_is_the_same_and_one_made_anew_another():
    table, key = SessionTable(), SessionKey.of("", "chat")
    table.put(key, SessionHints(made="a"), 0.0)
    assert table.put(key, SessionHints(priority=1, made="b"), 0.0) == SessionHints(priority=1, made="a")
    table.delete(key)
    assert table.put(key, SessionHints(made="c"), 0.0) == SessionHints(made="c")


def test_one_tenant_cannot_take_all_sessions():
    table = SessionTable()
    for index in range(MAX_TENANT_SESSIONS):
        assert table.put(SessionKey("greedy", str(index)), SessionHints(), 0.0)
    assert table.put(SessionKey("greedy", "more"), SessionHints(), 0.0) is None
    assert table.put(SessionKey("greedy", "0"), SessionHints(priority=1), 0.0)  # replacing needs no room
    assert table.put(SessionKey("modest", "0"), SessionHints(), 0.0)
    assert table.put(SessionKey("greedy", "more"), SessionHints(), IDLE_S)


def test_there_is_an_end_to_the_sessions_of_all():
    table = SessionTable()
    for index in range(MAX_SESSIONS):
        assert table.put(SessionKey(str(index % 64), str(index)), SessionHints(), 0.0)
    assert table.put(SessionKey("new", "0"), SessionHints(), 0.0) is None


# ---- records of pins


def record(session: str, count: int, until_s: float, root: bytes = b"r" * 16) -> PinRecord:
    return PinRecord(session, root, b"".join(bytes([index]) * 16 for index in range(count)), until_s)


def test_a_longer_pin_of_the_same_chain_replaces_the_shorter():
    records = PinRecords(100)
    for count in (1, 2, 3):
        records.add(record("s", count, 10.0 + count), 0.0)
    assert len(records) == 1
    records.add(record("s", 4, 5.0), 0.0)  # ends sooner: both are needed
    assert (len(records), records.num_hashes) == (2, 7)


def test_records_are_bounded_and_forgotten_in_time():
    records = PinRecords(10)
    for name in "abcd":
        records.add(record(name, 4, 10.0), 0.0)
    assert records.num_hashes <= 10
    records.add(record("e", 4, 30.0), 20.0)
    assert len(records) == 1


def test_others_of_the_same_tenant_go_on():
    records = PinRecords(100)
    mine, other, gone, foreign = (
        record("s", 2, 9.0),
        record("t", 3, 9.0),
        record("u", 3, 1.0),
        record("s2", 1, 9.0, b"x"),
    )
    for one in (mine, other, gone, foreign):
        records.add(one, 0.0)
    assert records.end("s", 5.0) == ([mine], [other.first(2)])


def test_pins_of_other_prompts_are_not_concerned():
    records = PinRecords(100)
    records.add(record("s", 2, 9.0), 0.0)
    records.add(PinRecord("t", b"r" * 16, bytes([7]) * 32, 9.0), 0.0)
    assert records.end("s", 5.0)[1] == []
    assert len(records) == 1


# ---- the engine's pins


def scheduler(blocks: int = 64) -> Scheduler:
    return Scheduler(BlockPool(blocks, block_size=BLOCK), SchedulerConfig(64, 8, 8))


def serve(sched: Scheduler, tokens: list[int], **hints: object) -> None:
    """A request that computes its prompt, says one token and ends."""
    request = SequenceRequest(
        request_id="r",
        token_ids=tokens,
        num_prompt_tokens=len(tokens),
        block_hashes=list(block_hashes(tokens, BLOCK)),
        sampling=Sampling(max_tokens=1),
        hints=KvHints(**hints),
    )
    seq = sched.add(request, sched.pool.now_s)
    for item in sched.schedule().work:
        sched.advance(item)
    sched.finish(seq, "length")
    sched.check()


def test_pins_end_with_their_session():
    sched = scheduler()
    serve(sched, list(range(16)), pin_s=60.0, session="s")
    assert sched.pool.counts().pinned == 4
    sched.blocks.pinning.end("other")
    assert sched.pool.counts().pinned == 4
    sched.blocks.pinning.end("s")
    sched.check()
    assert sched.pool.counts().pinned == 0


def test_a_request_of_a_session_that_has_ended_pins_nothing():
    sched = scheduler()
    sched.blocks.pinning.end("s")
    serve(sched, list(range(16)), pin_s=60.0, session="s")
    assert sched.pool.counts().pinned == 0
    serve(sched, list(range(16)), pin_s=60.0, session="s, made anew")
    assert sched.pool.counts().pinned == 4


def test_what_another_session_has_pinned_too_stays_as_long_as_that_wants():
    sched = scheduler()
    serve(sched, list(range(16)), pin_s=90.0, session="s")
    serve(sched, list(range(8)), pin_s=30.0, session="t")
    sched.blocks.pinning.end("s")
    sched.check()
    assert sched.pool.counts().pinned == 2
    sched.pool.tick(29.0)
    assert sched.pool.counts().pinned == 2
    sched.pool.tick(30.0)
    assert sched.pool.counts().pinned == 0


def test_pins_without_a_session_outlive_every_session():
    sched = scheduler()
    serve(sched, list(range(16)), pin_s=60.0)
    serve(sched, list(range(16)), pin_s=90.0, session="s")
    sched.blocks.pinning.end("")
    sched.blocks.pinning.end("s")
    assert sched.pool.counts().pinned == 4


def test_ended_pins_can_be_made_again_and_end_when_the_new_time_is_over():
    pool = BlockPool(16, block_size=BLOCK)
    chain, blocks = HashChain.of(list(range(16)), BLOCK), pool.allocate(4)
    assert blocks is not None
    pool.insert(chain, blocks, 0, 4)
    pool.release(blocks)
    pool.pin(chain, 4, 10.0)
    pool.unpin(chain, 4)
    pool.unpin(chain, 4)  # once is enough
    pool.check()
    assert pool.counts().pinned == 0
    pool.pin(chain, 4, 50.0)
    pool.tick(20.0)
    assert pool.counts().pinned == 4
    pool.tick(50.0)
    pool.check()
    assert pool.counts().pinned == 0


def test_pins_of_a_worker_without_lower_tiers_need_none():
    pinning = Pinning(BlockPool(4, block_size=BLOCK), lambda: None)
    pinning.end("s")
