"""A transport whose reads end when the test lets them."""

import asyncio

from kvrelay.kvtransfer.transports.base import Transport, TransportError
from kvrelay.kvtransfer.transports.loopback import LOOPBACK, LoopbackReader


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
                self._copy(landed, copies)
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
