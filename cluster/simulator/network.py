"""Links that transfers share, in a fluid model: each flow gets an equal share of a link, or less if it needs less.
Pure.

A flow crosses a few links (out of one machine, into another) at the least of its shares there. Bytes that a prefill is
still computing arrive at the prefill's rate: see `Flow.add`. What a flow cannot use of one link because another is
slower is not given to others, so shares are a little below those of a real network.
"""

import math
from collections.abc import Callable, Iterable

from kvrelay.cluster.simulator.clock import Clock, Event


class NetworkLink:
    """One direction of one machine's network, or of its memory."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s, self.moved_bytes = bytes_per_s, 0.0
        self.flows: dict[Flow, None] = {}  # with bytes to move, in order

    def share(self) -> float:
        """Bytes per second that a flow may take at most; flows that need less leave the rest to the others."""
        if len(self.flows) == 1:
            return self.bytes_per_s
        wants = sorted(flow.rate_limit for flow in self.flows)
        left, count = self.bytes_per_s, len(wants)
        for want in wants:
            if want * count > left:
                return left / count
            left -= want
            count -= 1
        return self.bytes_per_s


class Flow:
    """A transfer from one worker to another."""

    def __init__(self, clock: Clock, links: tuple[NetworkLink, ...], done: Callable[[], object]) -> None:
        self._clock, self._done = clock, done
        self.links = links
        self.rate_limit = math.inf
        self.moved_bytes = self.read_s = 0.0  # read_s: time of moving them at full rate, without pauses
        self.is_over = False
        self._waiting_bytes = self._rate = 0.0
        self._settled_s, self._is_closed = clock.now_s, False
        self._ends: Event | None = None

    def add(self, num_bytes: float, seconds: float) -> None:
        """Within `seconds`, `num_bytes` more become ready, evenly.

        Bytes that still wait are spread over that time as well.
        """
        if self.is_over:
            return
        self._settle()
        self._waiting_bytes += num_bytes
        self.rate_limit = self._waiting_bytes / seconds if seconds > 0 else math.inf
        self._changed()

    def close(self, num_bytes: float) -> None:
        """The last bytes, all ready; `done` is called when they have been moved."""
        if self.is_over:
            return
        self._settle()
        self._waiting_bytes += num_bytes
        self.rate_limit, self._is_closed = math.inf, True
        self._changed()

    def cancel(self) -> None:
        if not self.is_over:
            self._settle()
            self._leave()

    def set_rate(self, rate: float) -> None:
        if rate == self._rate and (self._ends is not None or not self._is_closed):
            return
        self._settle()
        self._rate = rate
        if self._ends is not None:
            self._ends.cancel()
            self._ends = None
        if self._is_closed and rate > 0:
            self._ends = self._clock.after(self._waiting_bytes / rate, self._end)

    def _settle(self) -> None:
        """Account for what was moved since the last call."""
        now_s = self._clock.now_s
        moved = min(self._waiting_bytes, self._rate * (now_s - self._settled_s))
        if moved > 0:
            self._waiting_bytes -= moved
            self.moved_bytes += moved
            slowest = math.inf
            for link in self.links:
                link.moved_bytes += moved
                slowest = min(slowest, link.bytes_per_s)
            self.read_s += moved / slowest
        self._settled_s = now_s

    def _changed(self) -> None:
        for link in self.links:
            link.flows[self] = None
        _share(self.links)

    def _end(self) -> None:
        self._settle()
        self._waiting_bytes = 0.0
        self._leave()
        self._done()

    def _leave(self) -> None:
        self.is_over, self._rate = True, 0.0
        if self._ends is not None:
            self._ends.cancel()
            self._ends = None
        for link in self.links:
            link.flows.pop(self, None)
        _share(self.links)


def _share(links: Iterable[NetworkLink]) -> None:
    """Set the rate of every flow that crosses these links."""
    touched: dict[Flow, None] = {}
    for link in links:
        touched.update(link.flows)
    shares: dict[NetworkLink, float] = {}
    for flow in touched:
        rate = flow.rate_limit
        for link in flow.links:
            share = shares.get(link)
            if share is None:
                share = shares[link] = link.share()
            if share < rate:
                rate = share
        flow.set_rate(rate)


class Network:
    """The links of every machine."""

    def __init__(self, clock: Clock, *, link_bytes_per_s: float, local_bytes_per_s: float) -> None:
        """link_bytes_per_s: of each machine, each way; local_bytes_per_s: between workers of one machine."""
        self._clock = clock
        self._link_bytes_per_s, self._local_bytes_per_s = link_bytes_per_s, local_bytes_per_s
        self._links: dict[tuple[str, str], NetworkLink] = {}

    def open(self, source_node: str, target_node: str, done: Callable[[], object]) -> Flow:
        if source_node == target_node:
            links: tuple[NetworkLink, ...] = (self.link(source_node, "local"),)
        else:
            links = (self.link(source_node, "out"), self.link(target_node, "in"))
        return Flow(self._clock, links, done)

    def link(self, node: str, direction: str) -> NetworkLink:
        """`out`, `in`, or `local`: within the machine."""
        key = node, direction
        if key not in self._links:
            self._links[key] = NetworkLink(self._local_bytes_per_s if direction == "local" else self._link_bytes_per_s)
        return self._links[key]

    def set_speed(self, node: str, share: float) -> None:
        """Set this machine's links to others to a share of their first bandwidth."""
        links = [self.link(node, direction) for direction in ("out", "in")]
        for link in links:
            link.bytes_per_s = share * self._link_bytes_per_s
        _share(links)

    @property
    def moved_bytes(self) -> float:
        """Bytes moved between and within machines, as of the last change of each flow."""
        return sum(link.moved_bytes for (_, direction), link in self._links.items() if direction != "in")
