"""A session's requests go to the same workers. Pure.

Source: Ray 2.60, serve/experimental/consistent_hash_router.py: a session's hash on a ring of the replicas' hashes; a request
without a session is hashed by its own id; the next replicas on the ring when the first does not accept. Here every worker's hash
with the session's is drawn and the least wins (rendezvous hashing, Thaler and Ravishankar 1998): as evenly spread as a ring of many
points, as few sessions moved when a worker comes or goes, and nothing to be kept between two calls.
"""

from functools import lru_cache
from hashlib import blake2b
from typing import ClassVar

import numpy as np

from kvrelay.router.policies.base import Options, RoutingContext, WorkerTable
from kvrelay.router.policies.checked import Checked, checked
from kvrelay.router.policies.picking import Ranked, TwoChoices, Words, best_rows, mixed, ranked, unit


class Session(TwoChoices):
    """Where its earlier requests went, as long as the workers are the same."""

    name: ClassVar[str] = "session"
    term_names: ClassVar[tuple[str, ...]] = ("prefill_distance", "decode_distance")

    def __init__(self, options: Options) -> None:
        checked(Checked, self.name, options)

    def prefill(self, context: RoutingContext, table: WorkerTable) -> Ranked:
        words = _words(context, table)
        distance = unit(words)
        return ranked(best_rows(distance, words), distance, (distance, 0.0))

    def decode(self, context: RoutingContext, table: WorkerTable) -> Ranked:
        words = _words(context, table)
        distance = unit(words)
        return ranked(best_rows(distance, words), distance, (0.0, distance))

    def alone(self, context: RoutingContext, table: WorkerTable) -> Ranked:
        return self.decode(context, table)


def _words(context: RoutingContext, table: WorkerTable) -> Words:
    key = np.uint64(_hashed("session:" + (context.request.session or context.request.request_id)))
    names = np.fromiter(map(_hashed_name, table.names), np.uint64, len(table))
    return mixed(names ^ key)


def _hashed(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=1 << 16)
def _hashed_name(name: str) -> int:
    """A worker's hash: the same for every router and after every start."""
    return _hashed("worker:" + name)
