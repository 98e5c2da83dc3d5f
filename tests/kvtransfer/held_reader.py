"""A transport whose reads end when the test lets them; what a window has room for; when both ends have settled."""

import asyncio

from kvrelay.errors import TransportError
from kvrelay.kvtransfer.transports.base import Transport
from kvrelay.kvtransfer.transports.memory import LOOPBACK, LoopbackReader


class HeldReader(LoopbackReader):
    """Reads that begin when asked and end when the test lets them; nothing can stop them, as with NIXL."""

    held = ()  # set by each test
    max_in_flight = 1  # so that their order is the read queue's

    def read(self, copies, landed=None):
        done = asyncio.get_running_loop().create_future()

        def finish(error=None):
            try:
                if error is not None:
                    raise error
                self.copy(copies, landed)
                done.set_result(None)
            except TransportError as problem:
                done.set_exception(problem)

        self.held.append(finish)
        self.has_begun.set()
        return done


def held_transport():
    """(the transports with loopback held, finish functions of the reads that have begun, event of the first read)."""
    kind = type("Held", (HeldReader,), {"held": [], "has_begun": asyncio.Event()})
    table = {"loopback": Transport("loopback", LOOPBACK.make_exporter, kind, LOOPBACK.why_not)}
    return table, kind.held, kind.has_begun


async def has_room(window, num_bytes):
    """Whether so many bytes may be announced at once; takes none."""
    turn = asyncio.create_task(window.take(num_bytes))
    await asyncio.sleep(0)
    if turn.done():
        window.give(turn.result())
        return True
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)
    return False


async def settled(source):
    """Every message that both ends have for each other now has come, and what those called forth: each way in order."""
    for _ in range(3):
        for link in source.links.values():
            await link.probe([], b"")
