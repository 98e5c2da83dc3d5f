"""A worker lends what its host tier holds to other workers. An Owner of slab_server.py that takes nothing in.

What the host tier holds belongs to the engine's thread: every loan is made and ended there, between two steps. Who has what,
the nodes of the store know: each worker announces its changes to the node that placement names for a block, and a worker
that finds a block nowhere asks that node. This costs workers nothing on a hit, and one small question on a miss.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from kvrelay.kvcache.index.changes import CacheChange
from kvrelay.kvcache.index.tier_index import TierIndex
from kvrelay.kvtransfer.slabs.messages import Offered
from kvrelay.kvtransfer.slabs.server import Loan, Room
from kvrelay.types import BlockHash

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
_LOOK_S = 0.2  # between two looks whether the engine still lives
_LENT_SHARE = 0.25  # of the slots may be on loan at once: the rest is the worker's own


class HostTier(Protocol):
    """What is needed of kvcache's Tiers."""

    index: TierIndex

    @property
    def block_bytes(self) -> int: ...

    def checksum(self, slot: int) -> int:
        """xxh3-64 of what was put into the slot."""


class PeerLender:
    """Lends one host tier."""

    def __init__(
        self,
        worker_id: str,
        epoch: str,
        tier: HostTier,
        name: Callable[[BlockHash], bytes],
        call: Callable[[Callable[[], list[Loan | None]]], "asyncio.Future[list[Loan | None]]"],
        post: Callable[[Callable[[], None]], None],
        is_alive: Callable[[], bool],
    ) -> None:
        """`name`: a block's key. `call` and `post` run what they are given on the engine's thread."""
        self.node_id, self.epoch = worker_id, epoch
        self._tier, self._name, self._call, self._post, self._is_alive = tier, name, call, post, is_alive
        self._hashes: dict[bytes, BlockHash] = {}  # written by the engine's thread, read by the loop's
        self.num_lent = 0
        self.is_closed = False  # the engine's thread is about to end, or waits for that

    # ---- on the engine's thread

    def changed(self, change: CacheChange) -> tuple[list[bytes], list[bytes]]:
        """The host tier's change as (keys that came, keys that went)."""
        removed = [self._name(digest) for digest in change.removed]
        for key in removed:
            self._hashes.pop(key, None)
        added = {self._name(digest): digest for digest in change.stored}
        self._hashes.update(added)
        return list(added), removed

    def _lend(self, hashes: Sequence[BlockHash | None]) -> list[Loan | None]:
        return [None if digest is None else self._lend_one(digest) for digest in hashes]

    def _lend_one(self, digest: BlockHash) -> Loan | None:
        tier, index = self._tier, self._tier.index
        if digest not in index or index.counts().held > _LENT_SHARE * index.num_slots:
            return None
        slot = index.hold((digest,))[0]
        return Loan(slot, slot * tier.block_bytes, tier.block_bytes, tier.checksum(slot), index.generation(slot))

    # ---- Owner

    def keys(self) -> list[bytes]:
        """All that is lent now."""
        return list(self._hashes)

    async def lend(self, keys: Sequence[bytes]) -> list[Loan | None]:
        hashes = [self._hashes.get(key) for key in keys]
        if not any(hashes):
            return [None] * len(keys)
        lending = self._call(lambda: self._lend(hashes))
        while not lending.done():  # in the middle of a step it takes a while
            await asyncio.wait({lending}, timeout=_LOOK_S)
            if not lending.done() and (self.is_closed or not self._is_alive()):
                lending.cancel()
                return [None] * len(keys)
        loans = lending.result()
        self.num_lent += sum(loan is not None for loan in loans)
        return loans

    def give_back(self, loans: Sequence[Loan]) -> None:
        slots = [loan.slot for loan in loans]
        self._post(lambda: self._tier.index.unhold(slots))

    def welcome(self, block_bytes: int) -> str | None:
        return None

    async def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self._hashes for key in keys]

    def describe(self) -> bytes:
        return json.dumps({"node_id": self.node_id, "blocks": len(self._hashes), "lent": self.num_lent}).encode()

    # ---- what a worker does not do for others

    def make_room(self, blocks: Sequence[Offered]) -> list[Room | bool]:
        return [False] * len(blocks)

    def keep(self, block: Offered, room: Room) -> bool:
        raise AssertionError("a worker makes no room for others' blocks")

    def drop(self, room: Room, *, read: "asyncio.Future[None] | None" = None) -> None:
        raise AssertionError("a worker makes no room for others' blocks")

    async def forget(self, keys: Sequence[bytes]) -> int:
        return 0  # a client's word is no reason to give up what is our own; our own reads verify it

    def pin(self, keys: Sequence[bytes], ttl_s: float) -> int:
        return 0

    async def replicate(self, keys: Sequence[bytes]) -> int:
        return 0

    def on_holding(self, client: object, address: str, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Only nodes of the store keep such notes."""

    def on_gone(self, client: object) -> None:
        """Nothing is kept of clients."""

    def whereabouts(self, keys: Sequence[bytes]) -> list[str]:
        return [""] * len(keys)
