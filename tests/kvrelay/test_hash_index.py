"""Names and their slots: the compiled table and the dict, against a plain model; both grow, shrink and forget alike."""

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrelay import hashing
from kvrelay.hashing import PythonHashIndex, distinct

pytestmark = pytest.mark.pure


NAMES = [number.to_bytes(16, "little") for number in range(40)] + [bytes([0]) * 15 + bytes([i]) for i in range(1, 20)]


def native(seed=5):
    if hashing.table_extension() is None:
        pytest.skip("no compiler")
    return hashing.table_extension().HashTable(seed)


MAKERS = {"python": PythonHashIndex, "native": native}


@pytest.fixture(params=sorted(MAKERS))
def table(request):
    return MAKERS[request.param]()


class Row:
    """A table with its columns, and what they should be."""

    def __init__(self, table, size):
        self.table, self.names, self.kinds = table, bytearray(16 * size), array("i", range(size))
        self.slot_of = {}

    def add(self, hashes, first):
        self.table.add(self.names, hashes, first)
        self.slot_of.update(zip(hashes, range(first, first + len(hashes)), strict=True))

    def remove(self, hashes):
        self.table.remove(self.names, [self.slot_of.pop(one) for one in hashes])

    def move(self, hashes, first):
        self.table.move(self.names, [self.slot_of[one] for one in hashes], first)
        self.slot_of.update(zip(hashes, range(first, first + len(hashes)), strict=True))

    def check(self, names):
        slots, kinds = self.table.find(self.names, self.kinds, names)
        assert slots == kinds == [self.slot_of.get(one, 0) for one in names]
        assert all(self.names[16 * slot : 16 * slot + 16] == one for one, slot in self.slot_of.items())
        assert self.table.count() == len(self.slot_of)


class TableMachine(RuleBasedStateMachine):
    """Few names in few slots, of two tables at once."""

    @initialize(seed=st.integers(0, (1 << 63) - 1))
    def begin(self, seed):
        self.rows = [Row(PythonHashIndex(), 64)]
        if hashing.table_extension() is not None:
            self.rows.append(Row(native(seed), 64))

    @property
    def held(self):
        return self.rows[0].slot_of

    @rule(data=st.data(), count=st.integers(0, 40))
    def add(self, data, count):
        new = [one for one in NAMES if one not in self.held]
        some = data.draw(st.permutations(new))[:count]
        places = [
            first
            for first in range(1, 64 - len(some))
            if not set(range(first, first + len(some))) & set(self.held.values())
        ]
        if places:
            first = data.draw(st.sampled_from(places))
            for row in self.rows:
                row.add(list(some), first)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def remove(self, data):
        some = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True))
        for row in self.rows:
            row.remove(some)

    @rule()
    def close_all_gaps(self):
        """As a row is made shorter."""
        ordered = sorted(self.held, key=self.held.__getitem__)
        for row in self.rows:
            row.move(ordered, 1)

    @invariant()
    def both_are_right(self):
        for row in getattr(self, "rows", []):
            row.check(NAMES)
            assert [row.table.find_one(row.names, one) for one in NAMES[:9]] == [
                row.slot_of.get(one, 0) for one in NAMES[:9]
            ]


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)


def test_a_hundred_thousand_come_and_go(table):
    rng, row = random.Random(4), Row(table, 100_001)
    names = [rng.randbytes(16) for _ in range(100_000)]
    row.add(names, 1)
    row.check(names)
    row.remove(rng.sample(names, 99_000))
    row.check(names)
    row.remove(list(row.slot_of))
    row.check(names[:100])
    row.add(names[:50], 7)
    row.check(names)


def test_what_is_no_name_has_no_slot(table):
    row = Row(table, 9)
    row.add(NAMES[:3], 1)
    row.check([b"", b"short", b"x" * 17, NAMES[1]])
    assert table.find_one(row.names, b"short") == 0


def test_the_compiled_table_takes_little_and_gives_it_back():
    row = Row(native(), 100_001)
    empty = row.table.num_bytes()
    names = [number.to_bytes(16, "big") for number in range(100_000)]
    row.add(names, 1)
    assert row.table.num_bytes() < empty + 8 * len(names) * 8 / 3
    row.remove(names)
    assert row.table.num_bytes() <= empty + 256 * 8 * 8


def test_the_dict_is_copied_when_it_is_much_too_large():
    row = Row(PythonHashIndex(), 100_001)
    row.add([number.to_bytes(16, "big") for number in range(100_000)], 1)
    large = row.table._row_of.__sizeof__()
    row.remove(list(row.slot_of)[10:])
    assert row.table._row_of.__sizeof__() < large / 1000
    row.check(list(row.slot_of))


@pytest.mark.parametrize(("slots", "first"), [([9], 1), ([0], 1), ([-1], 1), ([1], 9), ([1], 0)])
def test_the_compiled_table_touches_nothing_outside_of_the_row(slots, first):
    row = Row(native(), 9)
    row.add(NAMES[:3], 1)
    with pytest.raises(ValueError, match="no row"):
        row.table.move(row.names, slots, first)
    with pytest.raises(ValueError, match="no row"):
        row.table.add(row.names, NAMES[3:6], 7)
    with pytest.raises(ValueError, match="16 bytes"):
        row.table.add(row.names, [b"short"], 7)
    with pytest.raises(TypeError):
        row.table.remove(row.names, ["1"])


def test_without_a_compiler_it_is_a_dict(monkeypatch):
    monkeypatch.setattr(hashing, "table_extension", lambda: None)
    assert isinstance(hashing.new_hash_index(), PythonHashIndex)
    if hashing.table_extension() is not None:
        monkeypatch.undo()
        assert isinstance(hashing.new_hash_index(), hashing.table_extension().HashTable)


@pytest.mark.parametrize("has_library", [True, False])
@given(st.lists(st.sampled_from([*NAMES, b"", b"short", b"x" * 17]), max_size=60))
def test_each_name_once_in_their_order(has_library, hashes):
    with pytest.MonkeyPatch.context() as patch:
        if not has_library:
            patch.setattr(hashing, "table_extension", lambda: None)
        assert distinct(hashes) == distinct(tuple(hashes)) == list(dict.fromkeys(hashes))


def test_many_names_and_names_that_collide_are_distinguished():
    """The first all lie in one place of the compiled check."""
    inverse = pow(0x9E3779B97F4A7C15, -1, 1 << 64)
    crowded = [(number * inverse % (1 << 64)).to_bytes(8, "little") + bytes(8) for number in range(300)]
    many = [number.to_bytes(16, "little") for number in range(5000)]
    for names in (crowded, many, crowded[:1], []):
        assert distinct(names) == names and distinct([*names, *names]) == names
    if hashing.table_extension() is not None:
        assert [
            hashing.table_extension().are_distinct(names) for names in (crowded, crowded[:10], many, many[:1000])
        ] == [False, True, False, True]


def test_distinct_names_are_not_copied():
    native()
    assert distinct(NAMES) is NAMES
