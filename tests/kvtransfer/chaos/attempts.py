"""One transfer of tests/kvtransfer/chaos/chaos.py, with what is done to it: its script, and how it ended on both
sides.
"""

import asyncio
import contextlib
import itertools
import random
import time
from dataclasses import dataclass, field
from typing import Any

from kvrelay.kvtransfer.protocol.messages import open_ticket, seal
from tests.kvtransfer.chaos.content import LAYOUT, content, digests
from tests.kvtransfer.chaos.end import SECRET
from tests.kvtransfer.chaos.members import Gone, Incarnation

FLIP = "a bit flipped on arrival"
# (what is done, where in the transfer's life, how often of 1,000)
PLANS: dict[str, tuple[str, int]] = {
    "nothing": ("", 520),
    "revoked after the grant": ("granted", 20),
    "never opened": ("granted", 8),
    "opened after its lease": ("granted", 4),
    "target's blocks re-used after the grant": ("granted", 15),
    "cancelled after open": ("opened", 30),
    "revoked after open": ("opened", 30),
    "cancelled mid-announce": ("announcing", 40),
    "revoked mid-announce": ("announcing", 40),
    "cancelled before commit": ("announced", 30),
    "revoked before commit": ("announced", 30),
    "cancelled after commit": ("committed", 40),
    "revoked after commit": ("committed", 40),
    "source's blocks re-used while announcing": ("announcing", 15),
    "source's blocks re-used after commit": ("committed", 15),
    "committed incomplete": ("", 20),
    FLIP: ("", 20),
    "ticket damaged": ("", 13),
    "ticket sealed by strangers": ("", 13),
    "ticket of another request": ("", 13),
    "ticket of a dead target": ("", 13),
    "ticket opened twice at one source": ("opened", 10),
    "ticket opened at two sources": ("opened", 11),
    "ticket replayed after commit": ("", 10),
}
MUST_NOT_COMMIT = {
    "revoked after the grant", "never opened", "opened after its lease", "target's blocks re-used after the grant",
    "committed incomplete", FLIP, "ticket damaged", "ticket sealed by strangers",
    "ticket of another request", "ticket of a dead target",
}  # fmt: skip
WAIT_FOR_LEASES = {"never opened", "opened after its lease"}
ABORTS = {name for name in PLANS if name.startswith(("cancelled", "revoked"))}


@dataclass(slots=True, eq=False)
class Opening:
    """One source's try with the ticket. `blocks`, `generations`: what it holds of the sequence."""

    name: str
    source: Incarnation
    ended: "asyncio.Future[str]"
    blocks: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    is_left_to_end: bool = False  # commit or cancel has been ordered

    def end(self, outcome: str) -> None:
        if not self.ended.done():
            self.ended.set_result(outcome)


@dataclass(slots=True, eq=False)
class Attempt:
    """One grant and everything that is tried with it."""

    request_id: str
    plan: str
    path: str
    source: Incarnation
    target: Incarnation
    first_block: int
    num_blocks: int
    ended: "asyncio.Future[str]"  # of the grant: its outcome, once its blocks are back
    openings: list[Opening] = field(default_factory=list)
    failure: str = ""  # what the target said, before the release
    committed: list[str] = field(default_factory=list)  # openings whose blocks the target took
    transport: str = ""
    wrong_blocks: int = 0
    aborted_at: float | None = None
    num_freezes: int = 0  # of both so far, when it began

    @property
    def was_frozen(self) -> bool:
        """Whether either side has been since it began."""
        return self.source.num_freezes + self.target.num_freezes != self.num_freezes

    @property
    def stage(self) -> str:
        return PLANS[self.plan][0]

    def end(self, outcome: str) -> None:
        if not self.ended.done():
            self.ended.set_result(outcome)

    def ends(self) -> list["asyncio.Future[str]"]:
        return [self.ended, *(opening.ended for opening in self.openings)]

    def involves(self, life: Incarnation) -> bool:
        return life in (self.source, self.target) or any(opening.source is life for opening in self.openings)

    def take_commit(self, event: dict[str, Any]) -> None:
        """The target has committed: compare what it has with what that source wrote."""
        self.committed.append(event["opening"])
        self.transport = event["transport"]
        opening = next((opening for opening in self.openings if opening.name == event["opening"]), None)
        expected: list[str] = []
        if opening is not None:
            blocks, generations = opening.blocks[self.first_block :], opening.generations[self.first_block :]
            expected = digests(content(opening.source.epoch, blocks, generations))
        found = event["digests"]
        pairs = zip(expected, found, strict=False)
        self.wrong_blocks += sum(a != b for a, b in pairs) + abs(len(found) - len(expected))

    def outcome(self) -> str:
        """In a few words, without numbers."""
        if self.committed:
            return "committed"
        ended = self.ended.result()
        if ended == "killed":
            return "target killed"
        if self.failure:
            return _short(self.failure)
        refused = [opening.ended.result() for opening in self.openings if opening.ended.done()]
        return next((f"{_short(why)} (at the source)" for why in refused if ": " in why), "revoked")


def _short(outcome: str) -> str:
    """Error class and reason word."""
    kind, _, why = outcome.partition(": ")
    return f"{kind}: {why.partition(':')[0]}" if kind == "TransferRefused" else kind


class Script:
    """Runs one attempt: grant, open, announce, commit, and what the plan does in between."""

    def __init__(self, attempt: Attempt, rng: random.Random, others: list[Incarnation], stale: bytes | None) -> None:
        self.attempt, self._rng, self._others, self._stale = attempt, rng, others, stale

    async def run(self, ticket: bytes, lease_s: float) -> None:
        """Ends when all orders are given; the ends come later. Raises Gone when one of the two dies."""
        attempt = self.attempt
        if attempt.plan == "opened after its lease":
            await asyncio.sleep(lease_s * 1.2)
        await self._at("granted", None)
        if attempt.plan == "never opened":
            return
        opening = await self._open(attempt.source, attempt.request_id, self._ticket(ticket))
        if opening is None:
            return
        await self._at("opened", opening)
        if attempt.plan.startswith("ticket opened"):
            await self._open_again(ticket)
        await self._announce(opening)
        await self._at("announced", opening)
        await self._commit(opening)
        await self._at("committed", opening)
        if attempt.plan == "ticket replayed after commit" and await opening.ended == "committed":
            await self._replay(ticket)

    async def _at(self, stage: str, opening: Opening | None) -> None:
        """What the plan does at this stage."""
        attempt, plan = self.attempt, self.attempt.plan
        if attempt.stage != stage:
            return
        if stage == "committed":
            await asyncio.sleep(self._rng.choice((0, 0.001, 0.003)))
        if plan in ABORTS:
            attempt.aborted_at = time.monotonic()
        if plan.startswith("revoked"):
            await attempt.target.ask("revoke", request_id=attempt.request_id)
        elif plan.startswith("cancelled") and opening is not None:
            await self._cancel(opening)
        elif plan.startswith("source's") and opening is not None:
            await opening.source.ask("take_away", opening=opening.name)
        elif plan.startswith("target's"):
            await attempt.target.ask("take_away", request_id=attempt.request_id)

    def _ticket(self, ticket: bytes) -> bytes:
        """The ticket that the plan gives the source."""
        match self.attempt.plan:
            case "ticket damaged":
                at = self._rng.randrange(len(ticket))
                return ticket[:at] + bytes([ticket[at] ^ 0x04]) + ticket[at + 1 :]
            case "ticket sealed by strangers":
                return seal(open_ticket(ticket, SECRET), b"a stranger's secret")
            case "ticket of a dead target" if self._stale is not None:
                return self._stale
        return ticket

    async def _open(self, source: Incarnation, request_id: str, ticket: bytes) -> Opening | None:
        attempt = self.attempt
        if attempt.plan == "ticket of another request":
            request_id += "-other"
        elif attempt.plan == "ticket of a dead target":
            request_id = open_ticket(ticket, SECRET).request_id
        name = f"{attempt.request_id}/{len(attempt.openings)}"
        opening = Opening(name, source, asyncio.get_running_loop().create_future())
        attempt.openings.append(opening)
        try:
            answer = await source.ask(
                "open",
                opening=name,
                request_id=request_id,
                path=attempt.path,
                ticket=ticket.hex(),
                num_blocks=attempt.num_blocks,
            )
        except Gone:  # perhaps before anybody knew of this opening
            opening.end("killed")
            raise
        if "refused" in answer or "broken" in answer:
            opening.end(answer.get("refused") or f"broken: {answer['broken']}")
            return None
        opening.blocks, opening.generations = answer["blocks"], answer["generations"]
        return opening

    async def _open_again(self, ticket: bytes) -> None:
        """A duplicate, all the way to its commit, at the same source or another one."""
        source = self.attempt.source
        if self.attempt.plan == "ticket opened at two sources" and self._others:
            source = self._rng.choice(self._others)
        opening = await self._open(source, self.attempt.request_id, ticket)
        if opening is not None:
            await self._announce(opening)
            await self._commit(opening)

    async def _replay(self, ticket: bytes) -> None:
        opening = await self._open(self.attempt.source, self.attempt.request_id, ticket)
        if opening is not None:
            await self._announce(opening)
            await self._commit(opening)

    async def _announce(self, opening: Opening) -> None:
        """In a few pieces: chunks of blocks, groups of layers."""
        attempt, rng = self.attempt, self._rng
        cuts = sorted({0, attempt.num_blocks, *(rng.randint(0, attempt.num_blocks) for _ in range(rng.randint(0, 2)))})
        layers = sorted({0, LAYOUT.num_layers, *(rng.randint(0, LAYOUT.num_layers) for _ in range(rng.randint(0, 2)))})
        pieces = [(blocks, group) for blocks in itertools.pairwise(cuts) for group in itertools.pairwise(layers)]
        if attempt.plan == "committed incomplete":
            cells = [piece for piece in pieces if piece[0][1] > attempt.first_block]
            pieces.remove(rng.choice(cells))
        middle = rng.randint(0, len(pieces))
        for index, (blocks, group) in enumerate(pieces):
            if index == middle:
                await self._at("announcing", opening)
            await opening.source.ask("announce", opening=opening.name, blocks=blocks, layers=group)
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() * 0.002)

    async def _commit(self, opening: Opening) -> None:
        if not opening.is_left_to_end:
            opening.is_left_to_end = True
            await opening.source.ask("commit", opening=opening.name)

    async def _cancel(self, opening: Opening) -> None:
        is_committing, opening.is_left_to_end = opening.is_left_to_end, True
        await opening.source.ask("cancel", opening=opening.name)
        if not is_committing:  # else commit() ends, and that is told
            opening.end("cancelled")

    async def clean_up(self) -> None:
        """As an ingress does that gives up: tell whoever may still hold something; leave some to cancel or lease."""
        attempt = self.attempt
        for opening in attempt.openings:
            if not opening.is_left_to_end and not opening.ended.done():
                with contextlib.suppress(Gone):  # its end is told by who saw it go
                    await self._cancel(opening)
        is_over = attempt.ended.done() or not all(opening.ended.done() for opening in attempt.openings)
        if not is_over and attempt.plan != "never opened" and self._rng.random() < 0.5:
            with contextlib.suppress(Gone):
                await attempt.target.ask("revoke", request_id=attempt.request_id)
