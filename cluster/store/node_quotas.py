"""Tenants' quotas in the cluster's store, as one of its nodes keeps them. Pure.

A quota is of bytes over all nodes. Each node keeps the part of it that placement has of all copies, so the parts add up
to the whole, and no node needs to know what another one holds.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction

from kvrelay.kvcache.stores.placement import StoreAddress, copy_share


class NodeQuotas:
    """Most bytes of each tenant on one node, in memory and as much again on disk. Read from any thread."""

    def __init__(self, default_bytes: int | None) -> None:
        """`default_bytes`: over all nodes, of a tenant without a quota of its own; None: no limit."""
        self._default_bytes = default_bytes
        self._by_tenant: Mapping[str, int] = {}
        self._nodes: tuple[StoreAddress, ...] = ()
        self._share = Fraction(1)

    def bytes_here(self, tenant: str) -> int | None:
        """None: no limit."""
        most = self._by_tenant.get(tenant, self._default_bytes)
        return None if most is None else int(most * self._share)

    def set_quotas(self, by_tenant: Mapping[str, int]) -> None:
        """Bytes over all nodes, of the tenants that have a quota of their own."""
        self._by_tenant = dict(by_tenant)

    def set_nodes(self, own: StoreAddress, others: Sequence[StoreAddress], num_replicas: int) -> None:
        """The live nodes; workers come and go more often."""
        nodes = (own, *(node for node in others if node.node_id != own.node_id))
        if nodes != self._nodes:
            self._nodes, self._share = nodes, copy_share(own, nodes[1:], num_replicas)
