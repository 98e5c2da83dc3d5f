"""What harms hosts and the links between them. The first host, with Ray's head and the ingresses, stays up."""

import asyncio
from collections.abc import Callable

from kvrelay.cluster.chaos.faults import FaultKind
from kvrelay.cluster.chaos.hosts.cluster import HEAD, ClusterOnHosts
from kvrelay.cluster.chaos.hosts.namespaces import Hosts

RATE, LATENCY_S = "10mbit", 0.1  # of a slow link, each way


class HostFault(FaultKind):
    """`begin` and `end` of it on a host other than the first. Workers are not harmed otherwise meanwhile: those of the
    other hosts may be the only ones. Nor is the registry, which may be on that host.
    """

    part, also, is_held = "hosts", ("decode", "prefill", "registry"), True

    def __init__(
        self, cluster: ClusterOnHosts, begin: Callable[[Hosts, int, int], None], end: Callable[[Hosts, int, int], None]
    ) -> None:
        self._cluster, self._begin, self._end = cluster, begin, end
        self._host, self._sender = HEAD, HEAD

    async def strike(self, choice: float) -> None:
        """`choice` is also that of the sender, the first host or the other one, whose packets a one-way link loses."""
        place = choice * (self._cluster.hosts.count - HEAD)
        self._host = HEAD + 1 + int(place)
        self._sender = HEAD if place % 1 < 0.5 else self._host
        await asyncio.to_thread(self._begin, self._cluster.hosts, self._host, self._sender)

    def undo(self) -> None:
        self._end(self._cluster.hosts, self._host, self._sender)

    def is_over(self) -> bool:
        return self._cluster.keep_up(self._host) and bool(self._cluster.part("registry"))


def _both_ways(
    begin: Callable[[Hosts, int], None], end: Callable[[Hosts, int], None]
) -> Callable[[ClusterOnHosts], FaultKind]:
    return lambda cluster: HostFault(
        cluster, lambda hosts, host, _: begin(hosts, host), lambda hosts, host, _: end(hosts, host)
    )


HOST_FAULTS: dict[str, Callable[[ClusterOnHosts], FaultKind]] = {
    "cut-link": _both_ways(Hosts.cut, Hosts.mend),
    "slow-link": _both_ways(lambda hosts, host: hosts.slow(host, RATE, LATENCY_S), Hosts.fast),
    "one-way-link": lambda cluster: HostFault(
        cluster,
        lambda hosts, host, sender: hosts.deafen(sender, HEAD + host - sender),
        lambda hosts, host, sender: hosts.reconcile(sender, HEAD + host - sender),
    ),
    "crash-host": _both_ways(Hosts.crash, Hosts.start),
}
