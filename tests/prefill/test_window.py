"""How far announcements may run ahead of the reader."""

import asyncio

import pytest

from kvrelay.prefill.source_link import Window
from tests.kvtransfer.held_reader import has_room

pytestmark = pytest.mark.pure


async def test_a_window_makes_wait_and_serves_in_order():
    window, order = Window(10), []

    async def take(name, size):
        await window.take(size)
        order.append(name)

    await take("first", 8)
    tasks = [asyncio.create_task(take(name, size)) for name, size in (("big", 9), ("small", 1))]
    await asyncio.sleep(0)
    assert order == ["first"]  # the small one does not overtake
    window.give(8)
    await asyncio.gather(*tasks)
    assert order == ["first", "big", "small"]
    assert not await has_room(window, 1)


async def test_more_than_the_window_takes_the_whole_window():
    window = Window(10)
    assert await window.take(100) == 10
    assert not await has_room(window, 1)


async def test_a_waiter_that_leaves_takes_nothing_and_does_not_delay_others():
    window = Window(10)
    await window.take(10)
    leaver, waiter = asyncio.create_task(window.take(10)), asyncio.create_task(window.take(2))
    await asyncio.sleep(0)
    leaver.cancel()
    window.give(4)
    assert await waiter == 2
    assert await has_room(window, 2) and not await has_room(window, 3)


async def test_a_waiter_that_leaves_at_its_turn_returns_what_it_was_given():
    window = Window(10)
    await window.take(10)
    leaver = asyncio.create_task(window.take(10))
    await asyncio.sleep(0)
    window.give(10)
    leaver.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaver
    assert await has_room(window, 10)
