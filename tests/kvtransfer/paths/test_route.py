"""A route: one reader for each path, replaced when it fails, and only then."""

import pytest

from kvrelay.errors import TransportError
from kvrelay.kvtransfer.paths.selection import PathTable, Route

pytestmark = pytest.mark.pure


class FakeReader:
    max_in_flight = 2

    def __init__(self):
        self.is_closed = False

    async def connect(self, descriptor):
        assert descriptor == b"there"

    async def aclose(self):
        self.is_closed = True


def route():
    return Route(PathTable([("tcp", "a test")]), {"tcp": b"there"}, lambda _name: FakeReader())


async def test_a_reader_that_fails_is_closed_and_the_next_read_gets_another():
    it = route()
    first = await it.reader("tcp")
    it.failed("tcp", "cut", first)
    second = await it.reader("tcp")
    await it.aclose()
    assert second is not first
    assert first.is_closed


async def test_reads_that_go_down_with_a_replaced_reader_do_not_close_the_new_one():
    it = route()
    first = await it.reader("tcp")
    it.failed("tcp", "cut", first)
    second = await it.reader("tcp")
    it.failed("tcp", "abandoned", first)
    assert await it.reader("tcp") is second
    assert not second.is_closed
    assert it.table["tcp"].problem == "cut"
    await it.aclose()


async def test_a_closed_route_opens_no_reader_any_more():
    it = route()
    first = await it.reader("tcp")
    await it.aclose()
    assert first.is_closed
    with pytest.raises(TransportError, match="closed"):
        await it.reader("tcp")
