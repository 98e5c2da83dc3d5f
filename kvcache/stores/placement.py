"""Placement of blocks on the nodes of the cluster's store: rendezvous hashing. Pure.

Every client and node computes the same answer from the list of live nodes. A node that joins or leaves moves only the
blocks that it gains or had.

Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998); weights: Schindelhauer and
Schomaker, "Weighted distributed hash tables" (2005).
"""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # splitmix64's finaliser
_SAMPLE = [number.to_bytes(8, "little") for number in range(1 << 13)]  # keys, of which placement makes random ones


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """One node of the store. `epoch` changes at every start, which empties the node's memory."""

    node_id: str
    host: str
    port: int
    capacity_bytes: int
    epoch: str = ""


@functools.lru_cache(4096)
def _seed(node_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(node_id.encode(), digest_size=8).digest(), "little")


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def ranked(keys: Sequence[bytes], nodes: Sequence[StoreAddress]) -> NDArray[np.int64]:
    """[keys, nodes] indices of the nodes, the best one for each key first.

    Args:
        keys: hashes of at least 8 bytes.

    A node is first for a share of the keys equal to its share of the capacity.
    """
    if not keys or not nodes:
        return np.zeros((len(keys), len(nodes)), dtype=np.int64)
    words = np.frombuffer(b"".join(key[-8:] for key in keys), dtype="<u8").astype(np.uint64)
    seeds = np.array([_seed(node.node_id) for node in nodes], np.uint64)
    capacities = np.array([max(node.capacity_bytes, 1) for node in nodes], np.float64)
    uniform = ((_mixed(words[:, None] ^ seeds) >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
    scores = np.log(uniform) / capacities  # the greatest is nearest to 0
    order: NDArray[np.int64] = np.argsort(-scores, axis=1, kind="stable")
    return order


def places(keys: Sequence[bytes], nodes: Sequence[StoreAddress], num_replicas: int) -> list[list[StoreAddress]]:
    """For each key the nodes that should hold it, best first; fewer if there are not enough nodes."""
    return [[nodes[i] for i in row[:num_replicas]] for row in ranked(keys, nodes).tolist()]


def copy_share(own: StoreAddress, others: Sequence[StoreAddress], num_replicas: int) -> Fraction:
    """The share of all blocks' copies that placement puts on the node `own`, counted for a sample of keys.

    The same sample is counted on every node, so the shares of all nodes add up to exactly 1.
    """
    chosen = ranked(_SAMPLE, [own, *others])[:, :num_replicas]
    return Fraction(int((chosen == 0).sum()), chosen.size)
