"""Sets of hashes: the compiled set and the dict do the same, grow, pack and forget alike."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.kvcache.index import hash_set
from kvrelay.kvcache.index.changes import ChangeLog
from kvrelay.kvcache.index.hash_set import PythonHashSet

pytestmark = pytest.mark.pure

# Half of them have the same low half, so that some collide in small tables.
HASHES = [number.to_bytes(16, "little") for number in range(24)] + [bytes(15) + bytes([i]) for i in range(1, 25)]


def native():
    if hash_set.extension() is None:
        pytest.skip("no compiler")
    return hash_set.extension().HashSet(7)


@pytest.fixture(params=[PythonHashSet, native])
def make(request):
    return request.param


RUNS = st.lists(st.sampled_from(HASHES), max_size=70)
STEPS = st.lists(st.tuples(st.sampled_from(["toggle", "add", "remove", "clear"]), st.integers(0, 1), RUNS), max_size=40)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_in_c_and_in_python_a_set_does_the_same(steps):
    compiled, plain = (native(), native()), (PythonHashSet(), PythonHashSet())
    for name, which, run in steps:
        results = []
        for sets in (compiled, plain):
            one, other = sets[which], sets[1 - which]
            arguments = {"toggle": (b"".join(run), other), "clear": ()}.get(name, (tuple(run),))
            results.append(getattr(one, name)(*arguments))
        assert results[0] == results[1]
        for one, other in zip(compiled, plain, strict=True):
            assert one.hashes() == other.hashes() and len(one) == len(other)
            assert [digest in one for digest in HASHES] == [digest in other for digest in HASHES]


def test_hashes_keep_their_order_while_old_ones_leave(make):
    """Rows of those that left are used again; more come and go than were ever there at once."""
    rng, one, model = random.Random(3), make(), {}
    for _ in range(300):
        fresh = tuple(rng.randbytes(16) for _ in range(rng.randrange(60)))
        gone = tuple(rng.sample(list(model), rng.randrange(min(len(model), 60) + 1)))
        assert one.add(fresh) == list(fresh) and one.remove(gone) == list(gone)
        model |= dict.fromkeys(fresh)
        for digest in gone:
            del model[digest]
        assert one.hashes() == tuple(model)
    one.clear()
    assert one.hashes() == () and one.add(tuple(model)) == list(model)


def test_a_set_of_many_is_empty_once_cleared(make):
    one, other, many = make(), make(), [number.to_bytes(16, "big") for number in range(10_000)]
    for _ in range(2):
        one.toggle(b"".join(many), other)
        assert len(one) == 10_000 and one.hashes() == tuple(many)
        other.toggle(b"".join(many[1:]), one)
        assert one.hashes() == (many[0],) and len(other) == 0
        one.clear()
        assert len(one) == 0 and many[0] not in one


def test_what_is_no_hash_is_in_no_set_and_is_refused():
    one = native()
    for bad in (b"short", bytes(17), "text", None, 5):
        assert bad not in one
        with pytest.raises(ValueError):
            one.add((bad,))
    for arguments in ((bytes(16), one), (bytes(16), PythonHashSet()), (bytes(16),), ("text", native())):
        with pytest.raises(TypeError):
            one.toggle(*arguments)
    with pytest.raises(TypeError):
        one.add([bytes(16)])
    assert len(one) == 0


def test_changes_that_cancel_out_are_not_drained():
    log, (first, second, third) = ChangeLog(), HASHES[:3]
    log.stored(first + second)
    log.removed(first)
    log.stored(third + first)
    change = log.drain()
    assert change.stored == (second, third, first) and change.removed == ()
    log.removed(second)
    log.stored(second)
    assert not log and log.drain() is None
