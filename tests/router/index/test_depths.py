"""How deep each worker holds a chain: two depths, holes, jumps; held against the plain definition by a state
machine.
"""

import gc
import random
from collections import OrderedDict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvrelay.router.index.hash_array import HashArray, anywhere_bit, both_bits, depths_by_row
from kvrelay.router.index.holders import CHUNK, MAX_MOVED_CHUNKS
from kvrelay.router.index.prefix_index import PrefixIndex
from kvrelay.router.types import IndexState
from tests.router.index.index_cases import depths, holders_of, kv_events, kv_snapshot, match, num_rows, num_sets
from tests.scale import scaled

pytestmark = pytest.mark.pure


def chain(name, length, first=0):
    return [f"{name}{i}".encode().ljust(16) for i in range(first, first + length)]


LONG = chain("x", 5 * CHUNK)


@pytest.fixture(autouse=True, scope="module")
def small_rows():
    """So that slots are soon filled anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvrelay.router.index.hash_array.MIN_GROWTH", 4)
        yield


def fed(**held):
    """An index whose workers hold these."""
    index = PrefixIndex()
    for worker_id, hashes in held.items():
        index.add_worker(worker_id, max_blocks=10_000)
        index.apply_snapshot(worker_id, kv_snapshot(0, hashes))
    return index


def twice(index, hashes):
    """As the first lookup finds it, and as jumps do."""
    walked, jumped = depths(index, hashes), depths(index, hashes)
    assert walked == jumped
    return walked


def num_runs(index, hashes):
    """How many rows of slots next to each other a chain lies in."""
    positions = [holders_of(index).array.position(one) for one in hashes]
    assert all(positions)
    return 1 + sum(position + 1 != after for position, after in pairwise(positions))


class Looks:
    """Counts the names that lookups compare and the pieces of the prompt that they pack."""

    def __init__(self, monkeypatch):
        self.hashes = 0
        is_named = HashArray._has_hashes

        def counted(positions, position, packed):
            self.hashes += len(packed) // 16
            return is_named(positions, position, packed)

        monkeypatch.setattr(HashArray, "_has_hashes", counted)

    def of(self, index, hashes):
        """Hashes compared by one lookup."""
        before = self.hashes
        depths(index, hashes)
        return self.hashes - before


def test_what_was_lowered_counts_below_the_pool_and_what_was_raised_in_it_again():
    index = fed(w1=LONG[:10], w2=LONG[:3])
    index.apply_events("w1", kv_events(1, [], [], lowered=LONG[4:6]))
    assert twice(index, LONG) == {"w1": (4, 10), "w2": (3, 3)}
    index.apply_events("w1", kv_events(2, [], [], raised=LONG[4:5]))
    assert twice(index, LONG) == {"w1": (5, 10), "w2": (3, 3)}


def test_what_is_stored_below_the_pool_at_once_is_no_hit_of_the_pool():
    index = fed(w1=[])
    index.apply_events("w1", kv_events(1, LONG[:4], [], lowered=LONG[2:4]))
    assert twice(index, LONG) == {"w1": (2, 4)}


def test_a_snapshot_says_what_is_below_the_pool():
    index = fed(w1=LONG[:10])
    index.apply_snapshot("w1", kv_snapshot(1, LONG[:8], LONG[:8]))
    assert twice(index, LONG) == {"w1": (0, 8)}
    index.apply_snapshot("w1", kv_snapshot(2, LONG[:8]))
    assert twice(index, LONG) == {"w1": (8, 8)}


@pytest.mark.parametrize("move", ["lowered", "raised"])
def test_moves_of_the_unknown_degrade_and_claim_nothing(move):
    index = fed(w1=LONG[:2])
    assert index.apply_events("w1", kv_events(1, [], [], **{move: LONG[2:3]})) is False
    assert (index.state("w1"), depths(index, LONG)) == (IndexState.DEGRADED, {"w1": (2, 2)})


def test_a_degraded_worker_is_asked_again_ever_more_rarely():
    index = fed(w1=[])
    index.apply_events("w1", kv_events(1, [], [LONG[0]]))
    asked = [seq for seq in range(2, 2000) if not index.apply_events("w1", kv_events(seq, [], []))]
    assert asked == [257, 257 + 512, 257 + 512 + 1024]


def test_what_is_no_hash_is_not_taken():
    index = fed(w1=[])
    assert index.apply_events("w1", kv_events(1, [LONG[0], b"short", b"l" * 17], [])) is False
    assert (index.state("w1"), index.num_blocks("w1"), len(index)) == (IndexState.DEGRADED, 1, 1)
    index.apply_snapshot("w1", kv_snapshot(2, [b"short", LONG[0]]))
    assert (index.state("w1"), index.num_blocks("w1")) == (IndexState.DEGRADED, 1)


def test_a_first_lookup_compares_each_name_and_later_ones_a_few(monkeypatch):
    looks, index = Looks(monkeypatch), fed(w1=LONG, w2=LONG[: 2 * CHUNK + 5])
    assert len(LONG) <= looks.of(index, LONG) < len(LONG) + 20
    assert looks.of(index, LONG) == 1
    assert looks.of(index, [*LONG[:200], *chain("y", 10)]) < 12  # where they part is searched by halves
    assert depths(index, LONG) == {"w1": (320, 320), "w2": (133, 133)}
    assert depths(index, [*LONG[: CHUNK - 1], *chain("y", 10)]) == {"w1": (63, 63), "w2": (63, 63)}


def test_who_comes_to_hold_it_and_who_goes_takes_nothing_of_what_is_known_of_a_chain(monkeypatch):
    looks, index = Looks(monkeypatch), fed(w1=LONG, w2=[])
    depths(index, LONG)
    index.apply_events("w2", kv_events(1, LONG[:100], []))
    index.apply_events("w1", kv_events(1, [], LONG[50:]))
    assert looks.of(index, LONG) == 1
    assert depths(index, LONG) == {"w1": (50, 50), "w2": (100, 100)}


@pytest.mark.parametrize("first", [0, 1, 30, CHUNK - 1])
def test_runs_that_were_stored_as_one_are_found_where_they_lie(first):
    """Chunks count from the chain's beginning, runs from where an event began."""
    index = fed(w1=LONG[:first])
    index.apply_events("w1", kv_events(1, [*LONG[first : 3 * CHUNK], *chain("y", CHUNK)], []))
    assert depths(index, [*LONG[: 2 * CHUNK + 9], *chain("n", CHUNK)]) == {"w1": (2 * CHUNK + 9,) * 2}
    assert twice(index, LONG) == {"w1": (3 * CHUNK, 3 * CHUNK)}
    index.apply_events("w1", kv_events(2, [], [LONG[CHUNK + first]]))
    assert twice(index, LONG) == {"w1": (CHUNK + first, CHUNK + first)}


def test_a_run_of_blocks_that_are_no_chain_is_no_hit():
    index = fed(w1=[*LONG[:3], *LONG[10 : 10 + CHUNK]])
    assert twice(index, LONG) == {"w1": (3, 3)}
    assert twice(index, [*LONG[:3], LONG[5], *LONG[11:90]]) == {"w1": (3, 3)}


def test_what_is_held_no_more_leaves_nothing_and_its_slots_are_used_again():
    index = fed(w1=LONG, w2=LONG[:CHUNK])
    holders = holders_of(index)
    size = len(holders.array.set_ids)
    for turn in range(20):
        index.apply_events("w1", kv_events(2 * turn + 1, chain(f"t{turn}", 300), LONG if not turn else []))
        index.apply_events("w1", kv_events(2 * turn + 2, [], chain(f"t{turn}", 300)))
    index.apply_events("w2", kv_events(1, [], LONG[:CHUNK]))
    assert (len(index), num_sets(index), len(holders.array)) == (0, 0, 0)
    assert not any(holders.array.set_ids) and len(holders.array.set_ids) < 2 * size + 300


def test_scattered_blocks_are_moved_next_to_each_other_as_they_are_looked_up():
    hashes = chain("z", (MAX_MOVED_CHUNKS + 3) * CHUNK)
    index = fed(w1=hashes[::-1], w2=[])
    assert num_runs(index, hashes) == len(hashes)
    assert depths(index, hashes) == {"w1": (704, 704)}
    assert num_runs(index, hashes) <= (3 * CHUNK - 2) + 3 + MAX_MOVED_CHUNKS
    assert twice(index, hashes) == {"w1": (704, 704)}
    assert num_runs(index, hashes) <= 2 + MAX_MOVED_CHUNKS + 3
    index.apply_events("w2", kv_events(1, hashes[:100], []))
    index.apply_events("w1", kv_events(1, [], [hashes[60]]))
    assert twice(index, hashes) == {"w1": (60, 60), "w2": (100, 100)}


def test_chains_that_part_stay_where_they_are():
    """Two conversations with one beginning do not take it from each other."""
    one, other = chain("s", 9) + chain("a", 10) + chain("c", 20), chain("s", 9) + chain("a", 10) + chain("d", 20)
    index = fed(w1=[*one, *other[19:]])
    for hashes in (one, other, one, other):
        assert depths(index, hashes) == {"w1": (39, 39)}
    assert (num_runs(index, one), num_runs(index, other)) == (1, 2)


def test_a_hole_is_found_by_who_jumped_over_it_before():
    index = fed(w1=LONG, w2=LONG)
    assert twice(index, LONG) == {"w1": (320, 320), "w2": (320, 320)}
    index.apply_events("w1", kv_events(1, [], [LONG[CHUNK + 7]]))
    assert twice(index, LONG) == {"w1": (71, 71), "w2": (320, 320)}
    index.apply_events("w1", kv_events(2, [LONG[CHUNK + 7]], []))
    assert twice(index, LONG) == {"w1": (320, 320), "w2": (320, 320)}


def test_a_block_that_comes_back_is_found_in_another_slot():
    index = fed(w1=LONG)
    depths(index, LONG)
    index.apply_events("w1", kv_events(1, [], LONG[3:5]))
    index.apply_events("w1", kv_events(2, [*chain("y", 3), *LONG[3:5]], []))
    assert twice(index, LONG) == {"w1": (320, 320)} and num_runs(index, LONG) == 3


def test_chains_that_part_each_find_the_hole_before_it():
    one, other = chain("s", 9) + chain("a", CHUNK - 9), chain("s", 9) + chain("b", CHUNK - 9)
    index = fed(w1=[*one, *other[9:]])
    assert twice(index, one) == twice(index, other) == twice(index, one) == {"w1": (CHUNK, CHUNK)}
    index.apply_events("w1", kv_events(1, [], [one[3]]))
    assert twice(index, one) == twice(index, other) == {"w1": (3, 3)}


def test_rows_are_used_again():
    index = fed(w1=LONG[:3], w2=LONG[:2], w3=LONG[:1])
    assert [index.row(f"w{i}") for i in (1, 2, 3)] == [0, 1, 2]
    index.remove_worker("w2")
    assert num_rows(index) == 3
    assert index.add_worker("w4", max_blocks=5, stride=2) == 1
    index.apply_snapshot("w4", kv_snapshot(0, [LONG[1], LONG[3]]))
    assert depths(index, LONG) == {"w1": (3, 3), "w3": (1, 1), "w4": (4, 4)}


def test_masks_of_many_workers():
    names = {f"w{i}": LONG[: i % 9] for i in range(200)}
    assert twice(fed(**names), LONG) == {name: (len(held), len(held)) for name, held in names.items() if held}


def test_blocks_with_the_same_holders_are_of_one_kind():
    names = {f"w{i}": LONG for i in range(50)}
    index = fed(**names)
    assert num_sets(index) == 1
    index.remove_worker("w7")
    assert num_sets(index) == 1
    index.apply_events("w8", kv_events(1, [], LONG[:3]))
    assert num_sets(index) == 2


def test_the_collector_walks_none_of_it():
    positions = holders_of(fed(w1=LONG, w2=LONG)).array
    assert not any(
        gc.is_tracked(getattr(positions, name)) for name in HashArray.__slots__ if name not in ("set_ids", "_table")
    )


def test_slots_among_others_that_stay_are_filled():
    """Every other block stays, in an order of which no row is of use; what comes then lies between them."""
    hashes = chain("z", 3000)
    index = fed(w1=hashes)
    gone = [one for place, one in enumerate(hashes) if place % 2]
    random.Random(1).shuffle(gone)
    index.apply_events("w1", kv_events(1, [], gone))
    size = len(holders_of(index).array.set_ids)
    new = chain("n", 900)
    index.apply_events("w1", kv_events(2, new, []))
    assert len(holders_of(index).array.set_ids) == size
    assert twice(index, new) == {"w1": (900, 900)}
    assert depths(index, hashes) == {"w1": (1, 1)}
    assert index.num_blocks("w1") == 2400


def test_bits_of_rows():
    assert anywhere_bit(0) == 1 and both_bits(1) == 12
    many = sum(both_bits(row) for row in range(40))
    found = depths_by_row([(3, both_bits(41) - anywhere_bit(41)), (5, anywhere_bit(41)), (9, many)], 43)
    assert found[41].tolist() == [5, 3] and found[40].tolist() == found[42].tolist() == [0, 0]
    assert np.all(found[:40] == 9)


TREE = {
    "a": chain("s", 7) + chain("a", 8),
    "b": chain("s", 7) + chain("b", 5),
    "c": chain("s", 4) + chain("c", 9),
    "d": chain("d", 6),
}
BLOCKS = sorted({one for hashes in TREE.values() for one in hashes})
STRIDES = {"w1": 1, "w2": 1, "w3": 2, "w4": 1}


class Cache(OrderedDict):
    """A worker's pool of so many blocks: the longest unused go, ends of chains before beginnings."""

    def take(self, hashes, size):
        """(stored, removed)."""
        new = [one for one in hashes if one not in self]
        for one in reversed(hashes):
            self[one] = None
            self.move_to_end(one)
        gone = [self.popitem(last=False)[0] for _ in range(max(0, len(self) - size))]
        return [one for one in new if one in self], [one for one in gone if one not in new]


def test_rows_stay_long_and_few_while_caches_turn_over_many_times():
    """Conversations that share beginnings, on four workers; what they hold comes and goes a dozen times over."""
    rng, index, caches = random.Random(3), fed(w0=[], w1=[], w2=[], w3=[]), [Cache() for _ in range(4)]
    roots = [chain(f"root{number}-", 10 * number) for number in range(1, 6)]
    talks, seqs, most = [], [0] * 4, 0
    for step in range(2400):
        if len(talks) < 30:
            talks.append([*rng.choice(roots)])
        talk = talks.pop(rng.randrange(len(talks)))
        talk += chain(f"turn{step}-", rng.choice([1, 4, 20, 60]))
        if len(talk) < 300:
            talks.append(talk)
        depths(index, talk)
        worker = rng.randrange(4)
        seqs[worker] += 1
        assert index.apply_events(f"w{worker}", kv_events(seqs[worker], *caches[worker].take(talk, 1000)))
        most = max(most, len(index))
    assert len(holders_of(index).array.set_ids) < 2 * most
    held = [[one for one in talk if holders_of(index).array.position(one)] for talk in talks]
    assert sum(map(len, held)) > 20 * sum(num_runs(index, one) for one in held)
    for talk in talks:
        expected = [next((i for i, one in enumerate(talk) if one not in cache), len(talk)) for cache in caches]
        assert twice(index, talk) == {f"w{i}": (end, end) for i, end in enumerate(expected) if end}


ROADS = [chain("r", 90) + chain(name, 210) for name in ("r1-", "r2-", "r3-")]
pieces = st.tuples(
    st.sampled_from(["w1", "w2", "w3"]),
    st.sampled_from(ROADS),
    st.integers(0, 299),
    st.sampled_from([1, 5, 30, 300]),
    st.sampled_from(["stored", "stored", "reversed", "removed"]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(pieces, min_size=1, max_size=14), st.lists(st.integers(0, 300), min_size=3, max_size=3))
def test_pieces_of_long_chains_in_any_order_are_found_as_they_lie(happened, cuts):
    index, held = fed(w1=[], w2=[], w3=[]), {"w1": set(), "w2": set(), "w3": set()}
    for seq, (name, road, start, length, set_id) in enumerate(happened, 1):
        some = [one for one in road[start : start + length] if (one in held[name]) == (set_id == "removed")]
        changes = {"removed": some} if set_id == "removed" else {"stored": some if set_id == "stored" else some[::-1]}
        for worker_id in held:
            own_changes = changes if worker_id == name else {}
            assert index.apply_events(worker_id, kv_events(seq, **own_changes))
        held[name] = held[name] - set(some) if set_id == "removed" else held[name] | set(some)
        for road, cut in zip(ROADS, cuts, strict=True):
            for prompt in (road, [*road[:cut], *chain("unknown", 40)]):
                depth = {
                    worker_id: next((i for i, one in enumerate(prompt) if one not in own_bits), len(prompt))
                    for worker_id, own_bits in held.items()
                }
                assert twice(index, prompt) == {worker_id: (end, end) for worker_id, end in depth.items() if end}


class DepthsMachine(RuleBasedStateMachine):
    """Workers that store, lose, lower and raise any blocks, in any order, against sets and the definition."""

    @initialize()
    def begin(self):
        self.index = PrefixIndex(chunk=3)
        self.pool, self.in_any_tier, self.seq = {}, {}, {}

    @rule(
        name=st.sampled_from(sorted(STRIDES)),
        hashes=st.sets(st.sampled_from(BLOCKS)),
        low=st.sets(st.sampled_from(BLOCKS)),
    )
    def start(self, name, hashes, low):
        self.index.add_worker(name, max_blocks=1000, stride=STRIDES[name])
        self.index.apply_snapshot(name, kv_snapshot(0, sorted(hashes | low), sorted(low - hashes)))
        self.pool[name], self.in_any_tier[name], self.seq[name] = hashes, low - hashes, 0

    @precondition(lambda self: self.pool)
    @rule(data=st.data())
    def leave(self, data):
        name = data.draw(st.sampled_from(sorted(self.pool)))
        self.index.remove_worker(name)
        del self.pool[name], self.in_any_tier[name]

    def event(self, name, **changes):
        self.seq[name] += 1
        changes = {"stored": [], "removed": [], **{set_id: sorted(hashes) for set_id, hashes in changes.items()}}
        assert self.index.apply_events(name, kv_events(self.seq[name], **changes))

    @precondition(lambda self: self.pool)
    @rule(data=st.data(), chain_name=st.sampled_from(sorted(TREE)), length=st.integers(1, 15), low=st.booleans())
    def store_a_prefix(self, data, chain_name, length, low):
        name = data.draw(st.sampled_from(sorted(self.pool)))
        new = set(TREE[chain_name][:length]) - self.pool[name] - self.in_any_tier[name]
        (self.in_any_tier if low else self.pool)[name] |= new
        self.event(name, stored=new, lowered=new if low else ())

    @rule(chain_name=st.sampled_from("abc"), start=st.integers(1, 8), length=st.integers(1, 6))
    def start_alone_with_other_blocks_in_between(self, chain_name, start, length):
        """Names lie where the chain's would."""
        for name in list(self.pool):
            self.index.remove_worker(name)
        hashes = [*TREE[chain_name][:start], *TREE["d"][:length], *TREE[chain_name][start + length :]]
        self.index.add_worker("w1", max_blocks=1000)
        self.index.apply_snapshot("w1", kv_snapshot(0, hashes))
        self.pool, self.in_any_tier, self.seq = {"w1": set(hashes)}, {"w1": set()}, {"w1": 0}

    @precondition(lambda self: self.pool)
    @rule(data=st.data(), set_id=st.sampled_from(["removed", "lowered", "raised"]))
    def change(self, data, set_id):
        name = data.draw(st.sampled_from(sorted(self.pool)))
        pool, in_any_tier = self.pool[name], self.in_any_tier[name]
        source = {"removed": pool | in_any_tier, "lowered": pool, "raised": in_any_tier}[set_id]
        if not source:
            return
        some = data.draw(st.sets(st.sampled_from(sorted(source)), min_size=1, max_size=3))
        self.pool[name] = pool | some if set_id == "raised" else pool - some
        self.in_any_tier[name] = in_any_tier | some if set_id == "lowered" else in_any_tier - some
        self.event(name, **{set_id: some})

    def expected(self, hashes):
        found = {}
        for name, pool in self.pool.items():
            ends = hashes[STRIDES[name] - 1 :: STRIDES[name]]
            both = [
                next((i for i, one in enumerate(ends) if one not in held), len(ends)) * STRIDES[name]
                for held in (pool, pool | self.in_any_tier[name])
            ]
            if both[1]:
                found[name] = tuple(both)
        return found

    @invariant()
    def depths_are_the_definition_s(self):
        for hashes in TREE.values():
            for prompt in (hashes, [*hashes[:10], *chain("unknown", 4)]):
                expected = self.expected(prompt)
                assert depths(self.index, prompt) == expected
                assert match(self.index, prompt) == {name: anywhere for name, (_, anywhere) in expected.items()}
        held = [self.pool[name] | self.in_any_tier[name] for name in self.pool]
        assert [self.index.num_blocks(name) for name in self.pool] == list(map(len, held))

    def teardown(self):
        for name in list(getattr(self, "pool", ())):
            self.index.remove_worker(name)
        if hasattr(self, "index"):
            assert len(self.index) == 0
            assert not any(any(holders.array.set_ids) for holders in self.index._holders.values())


TestDepthsMachine = DepthsMachine.TestCase
TestDepthsMachine.settings = settings(max_examples=scaled(80), stateful_step_count=25, deadline=None)


def no_edges(monkeypatch):
    monkeypatch.setattr(HashArray, "_update_edge", lambda self, position: None)


def unverified(monkeypatch):
    is_named = HashArray._has_hashes
    monkeypatch.setattr(
        HashArray,
        "_has_hashes",
        lambda self, position, packed: is_named(self, position + len(packed) // 16 - 1, packed[-16:]),
    )


def kept_chains(monkeypatch):
    add = HashArray.add

    def without_forgetting(self, hashes, set_id):
        before = bytes(self._chained)
        add(self, hashes, set_id)
        self._chained[: len(before)] = before

    monkeypatch.setattr(HashArray, "add", without_forgetting)


@pytest.mark.parametrize("broken", [no_edges, unverified, kept_chains])
def test_the_machine_finds_an_index_that_assumes_what_it_must_verify(broken, monkeypatch):
    """Controls: jumps over changes of holders; only the ends of what is compared are; slots that are filled anew
    stay chained.
    """
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            DepthsMachine,
            settings=settings(
                max_examples=400, stateful_step_count=25, deadline=None, database=None, phases=[Phase.generate]
            ),
        )
