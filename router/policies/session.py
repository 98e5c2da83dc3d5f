"""Session affinity: the requests of a session go to the same workers. Pure.

Source: Ray 2.60, serve/experimental/consistent_hash_router.py: a session's hash on a ring of the replicas' hashes; a
request without a session is hashed by its own id; the next replicas on the ring when the first does not accept. Here
the worker with the lowest hash of (worker, session) wins (rendezvous hashing, Thaler and Ravishankar 1998): as evenly
spread as a ring of many points, as few sessions moved when a worker comes or goes, and no state between two calls.
"""

from functools import lru_cache
from hashlib import blake2b
from typing import ClassVar

import numpy as np

from kvrelay.router.policies.base import Options, RoutingContext, WorkerTable
from kvrelay.router.policies.options import PolicyOptions, parse_options
from kvrelay.router.policies.selection import IndependentChoice, RankedRows, Words, best_rows, mixed, rank_rows, unit


class Session(IndependentChoice):
    """The workers of the session's earlier requests, as long as the set of workers does not change."""

    name: ClassVar[str] = "session"
    term_names: ClassVar[tuple[str, ...]] = ("prefill_distance", "decode_distance")

    def __init__(self, options: Options) -> None:
        parse_options(PolicyOptions, self.name, options)

    def rank_prefill(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        words = _words(context, table)
        distance = unit(words)
        return rank_rows(best_rows(distance, words), distance, (distance, 0.0))

    def rank_decode(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        words = _words(context, table)
        distance = unit(words)
        return rank_rows(best_rows(distance, words), distance, (0.0, distance))


def _words(context: RoutingContext, table: WorkerTable) -> Words:
    """A hash of each worker with the session."""
    key = np.uint64(_hashed("session:" + (context.request.session or context.request.request_id)))
    names = np.fromiter(map(_hashed_name, table.names), np.uint64, len(table))
    return mixed(names ^ key)


def _hashed(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=1 << 16)
def _hashed_name(name: str) -> int:
    """A worker's hash: the same for every router and after every restart."""
    return _hashed("worker:" + name)
