"""Thousands of transfers between processes that are killed, frozen and restarted, with aborts at every stage.

    python tests/kvtransfer/chaos/chaos.py [-n 10000] [--seed 1] [--json FILE]
    python tests/kvtransfer/chaos/chaos.py -n 300 --corrupt     # must fail: flips bits where nobody checks
    python tests/kvtransfer/chaos/chaos.py -n 300 --leak        # must fail: a target forgets to give blocks back

Three sources and three targets, each a process with its own pool, over every transport that kvrelay has. About half
of the transfers are left alone; the others are revoked, cancelled, never opened, opened late, twice or with
a bad ticket, committed incomplete, flipped on arrival, or lose their blocks meanwhile; and all the time
processes are killed (SIGKILL) and started anew, or stopped (SIGSTOP) and continued.

What a block holds is a function of its source's epoch, its number and its generation, so that whatever the
target commits can be compared with what it should be, by digests made on both sides independently. Target blocks
that nobody holds carry a pattern, which a late write would break. Exit code 1 unless: no block is wrong, none is
missing at the end, nothing landed late, nothing was committed that had to be refused, no transfer hung,
and no process ended that was not killed.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import time
import typing
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from bench.figures import machine
from kvrelay.kvtransfer.paths.selection import TRANSPORTS
from kvrelay.kvtransfer.protocol.messages import open_ticket
from kvrelay.settings.choices import ChecksMode
from tests.kvtransfer.chaos.attempts import FLIP, MUST_NOT_COMMIT, PLANS, WAIT_FOR_LEASES, Attempt, Script
from tests.kvtransfer.chaos.end import LEASE_S, SECRET
from tests.kvtransfer.chaos.members import Gone, Incarnation, Member

HANG_S = 20.0  # after all orders are given: far beyond lease and deadline, frozen peers included
DRAIN_S = 10.0
CONCURRENCY = 16
NUM_MEMBERS = 3  # of each role; the last of each is never killed
FILES_OF_LINKS = 48  # which of its peers a process has connections with differs from moment to moment
START = "(a process's start)"  # among the recoveries
FREEZES_S = (0.05, 2.5)
FAULTS = {"kill": 50, "kill both": 10, "freeze": 40}
NIXL_MEMBERS = (0, NUM_MEMBERS - 1)  # an agent takes a while to start


class Chaos:
    """Everything that goes on in one run, and what came of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._seed, self._num, self._fault_every = options.seed, options.n, options.fault_every
        self._is_corrupting = options.corrupt
        self._weights = {plan: weight for plan, (_, weight) in PLANS.items()} | ({FLIP: 300} if options.corrupt else {})
        self._faults = random.Random(f"{options.seed} faults")
        self._members = {
            role: [Member(role, i, self._config(role, i, options), self._on_event) for i in range(NUM_MEMBERS)]
            for role in ("source", "target")
        }
        self._attempts: dict[str, Attempt] = {}  # in flight
        self._tickets: dict[Incarnation, list[bytes]] = defaultdict(list)  # some of those that a target has granted
        self._stale: list[bytes] = []
        self._num_done = self._num_started = 0
        self._acting: set[asyncio.Task[None]] = set()
        self._busy: set[str] = set()  # members under a fault
        self._waiting_for: dict[Incarnation, tuple[str, float]] = {}  # its next commit ends this recovery
        self.outcomes: Counter[str] = Counter()
        self.transports: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.recoveries: dict[str, list[float]] = defaultdict(list)
        self.problems: list[str] = []
        self.num_wrong = self.num_leaked = self.num_late = 0
        self.growth: dict[str, Any] = {}

    def _config(self, role: str, index: int, options: argparse.Namespace) -> dict[str, Any]:
        """Paths: each transport alone, all of them to choose from, and less than full checks."""
        wanted = options.transports or [name for name in TRANSPORTS if name != "loopback"]
        names = [name for name in wanted if name != "nixl" or index in NIXL_MEMBERS] or wanted
        every = [name for name in names if name != "nixl"] or names
        full = {"checks": "off" if options.corrupt else "full"}
        paths = {name: {"transports": [name], "settings": full} for name in names}
        paths["any"] = {"transports": every, "settings": full}
        for checks in set(typing.get_args(ChecksMode)) - {"full"}:
            paths[f"any, checks {checks}"] = {"transports": every, "settings": {**full, "checks": checks}}
        return {"paths": paths, "forgets": options.leak and role == "target"}

    # ---- events of the processes

    def _on_event(self, life: Incarnation, event: dict[str, Any]) -> None:
        if event["event"] == "gone":
            self._on_gone(life, event["crash"])
            return
        name = event["opening"].partition("/")[0] if "opening" in event else event["request_id"]
        attempt = self._attempts.get(name)
        if attempt is None:
            self.problems.append(f"{life.name}: {event['event']} of {name}, which had ended")
            return
        match event["event"]:
            case "source-end":
                next(o for o in attempt.openings if o.name == event["opening"]).end(event["outcome"])
            case "committed":
                attempt.take_commit(event)
                attempt.end("committed")
            case "failed":
                attempt.failure = event["outcome"]
            case "released":
                attempt.end("released")

    def _on_gone(self, life: Incarnation, crash: str) -> None:
        if crash:
            self.problems.append(f"{life.epoch} ended by itself: {crash}")
        self._waiting_for.pop(life, None)
        self._stale += self._tickets.pop(life, [])
        for attempt in self._attempts.values():
            if attempt.target is life:
                attempt.end("killed")
            for opening in attempt.openings:
                if opening.source is life:
                    opening.end("killed")

    # ---- transfers

    async def _worker(self) -> None:
        while self._num_started < self._num:
            self._num_started += 1
            number = self._num_started
            while not await self._attempt(number, random.Random(f"{self._seed} {number}")):
                await asyncio.sleep(0.02)  # a full pool, or somebody has just died: draw again
            self._num_done += 1
            if self._num_done % self._fault_every == 0:
                self._begin_fault()

    def _pick(self, role: str, rng: random.Random) -> Incarnation | None:
        ready = [member.now for member in self._members[role] if member.now.is_ready]
        awake = [life for life in ready if not life.is_frozen]
        chosen = awake if awake and rng.random() < 0.9 else ready
        return rng.choice(chosen) if chosen else None

    async def _attempt(self, number: int, rng: random.Random) -> bool:
        """One transfer from grant to both ends; False when it could not even begin."""
        source, target = self._pick("source", rng), self._pick("target", rng)
        if source is None or target is None:
            return False
        path = rng.choice([name for name in source.paths if name in target.paths])
        plan = rng.choices(list(self._weights), list(self._weights.values()))[0]
        plan, stale = self._fitting(plan, path, rng)
        num_blocks = rng.randint(1, 24) if rng.random() < 0.9 else rng.randint(48, 128)
        if stale is not None:
            num_blocks = open_ticket(stale, SECRET).num_blocks
        first_block = rng.randrange(num_blocks) if rng.random() < 0.2 else 0
        attempt = Attempt(
            f"r{number}.{rng.randrange(1 << 32):x}",
            plan,
            path,
            source,
            target,
            first_block,
            num_blocks,
            asyncio.get_running_loop().create_future(),
            num_freezes=source.num_freezes + target.num_freezes,
        )
        self._attempts[attempt.request_id] = attempt
        try:
            if not await self._run(attempt, rng, stale):
                return False
            await self._settle(attempt)
            return True
        finally:
            del self._attempts[attempt.request_id]
            attempt.end("never began, or hung")
            for opening in attempt.openings:
                opening.end("hung")

    def _fitting(self, plan: str, path: str, rng: random.Random) -> tuple[str, bytes | None]:
        """The plan, or another where it cannot be had; a dead target's ticket where it is wanted."""
        if plan == "ticket of a dead target":
            return (plan, rng.choice(self._stale)) if self._stale else ("nothing", None)
        if plan == FLIP and ", checks" in path and not self._is_corrupting:
            return "nothing", None
        return plan, None

    async def _run(self, attempt: Attempt, rng: random.Random, stale: bytes | None) -> bool:
        """Give all orders; False when there was no grant."""
        flip = attempt.plan == FLIP
        try:
            granted = await attempt.target.ask(
                "grant",
                request_id=attempt.request_id,
                path=attempt.path,
                first_block=attempt.first_block,
                num_blocks=attempt.num_blocks,
                flip=flip,
            )
        except Gone:
            return False
        if "ticket" not in granted:
            if "broken" in granted:
                self.problems.append(f"grant at {attempt.target.name}: {granted['broken']}")
            return False
        self.num_late += granted["late_writes"] - attempt.target.num_late_writes
        attempt.target.num_late_writes = granted["late_writes"]
        ticket = bytes.fromhex(granted["ticket"])
        if len(self._tickets[attempt.target]) < 4:
            self._tickets[attempt.target].append(ticket)
        others = [
            member.now
            for member in self._members["source"]
            if member.now.is_ready and member.now is not attempt.source and attempt.path in member.now.paths
        ]
        script = Script(attempt, rng, others, stale)
        with contextlib.suppress(Gone):  # the ends tell
            await script.run(ticket, LEASE_S)
        await script.clean_up()
        return True

    async def _settle(self, attempt: Attempt) -> None:
        """Wait for both ends, judge."""
        ends = attempt.ends()
        _, late = await asyncio.wait(ends, timeout=HANG_S)
        if late:
            sides = [opening.name for opening in attempt.openings if not opening.ended.done()]
            self.problems.append(f"{attempt.request_id} ({attempt.plan}, {attempt.path}) hung: {sides or 'the target'}")
            self.outcomes["hung"] += 1
            return
        now = time.monotonic()
        self.outcomes[attempt.outcome()] += 1
        self.num_wrong += attempt.wrong_blocks
        self._judge(attempt)
        if attempt.aborted_at is not None and not self._was_disturbed(attempt):
            self.recoveries["abort, until both sides were free"].append(now - attempt.aborted_at)
        if attempt.committed:
            self.transports[attempt.transport] += 1
            for life in (attempt.source, attempt.target):
                if life in self._waiting_for:
                    kind, since = self._waiting_for.pop(life)
                    self.recoveries[kind].append(now - since)

    def _was_disturbed(self, attempt: Attempt) -> bool:
        gone = any(life.is_gone for life in (attempt.target, *(opening.source for opening in attempt.openings)))
        return gone or attempt.was_frozen

    def _judge(self, attempt: Attempt) -> None:
        what = (
            f"{attempt.request_id} ({attempt.plan}, {attempt.path}, {attempt.source.epoch} to {attempt.target.epoch})"
        )
        if attempt.wrong_blocks:
            self.problems.append(f"{what}: {attempt.wrong_blocks} wrong blocks committed")
        if len(attempt.committed) > 1:
            self.problems.append(f"{what}: committed {len(attempt.committed)} times")
        was_late = attempt.plan == "opened after its lease" and attempt.was_frozen
        allowed = self._is_corrupting and attempt.plan == FLIP and attempt.wrong_blocks > 0
        if attempt.committed and attempt.plan in MUST_NOT_COMMIT and not (was_late or allowed):
            self.problems.append(f"{what}: committed, though it had to be refused")
        for opening in attempt.openings:
            if opening.ended.result() == "committed" and opening.name not in attempt.committed:
                self.problems.append(f"{what}: its source was told of a commit that never was")
            if opening.ended.result().startswith("broken"):
                self.problems.append(f"{what}: {opening.ended.result()}")

    # ---- faults

    def _begin_fault(self) -> None:
        kind = self._faults.choices(list(FAULTS), list(FAULTS.values()))[0]
        roles = ["source", "target"] if kind == "kill both" else [self._faults.choice(["source", "target"])]
        members = [self._faults.choice(self._members[role][: None if kind == "freeze" else -1]) for role in roles]
        if any(member.name in self._busy or not member.now.is_ready for member in members):
            return
        self.faults[kind if kind == "kill both" else f"{kind} a {roles[0]}"] += 1
        for member in members:
            act = self._freeze(member) if kind == "freeze" else self._kill(member)
            task = asyncio.create_task(act)
            self._busy.add(member.name)
            self._acting.add(task)
            task.add_done_callback(self._acting.discard)
            task.add_done_callback(lambda _, name=member.name: self._busy.discard(name))

    async def _kill(self, member: Member) -> None:
        life = member.now
        if self._faults.random() < 0.1:  # killed while frozen
            life.freeze()
            await asyncio.sleep(0.1)
        affected = self._hit_by(life)
        began = time.monotonic()
        life.kill()
        watch = asyncio.create_task(self._watch("kill, until its peers' blocks were free", life, affected, began))
        while not life.is_gone:
            await asyncio.sleep(0.005)
        await member.start()
        self._waiting_for[member.now] = ("kill, from restarted to the next commit with it", member.now.ready_at)
        self.recoveries[START].append(member.now.ready_at - began)
        await watch

    async def _freeze(self, member: Member) -> None:
        life = member.now
        affected = self._hit_by(life)
        began = time.monotonic()
        life.freeze()
        watch = asyncio.create_task(self._watch("freeze, until its peers' blocks were free", life, affected, began))
        await asyncio.sleep(self._faults.uniform(*FREEZES_S))
        life.thaw()
        self._waiting_for[life] = ("freeze, from continued to the next commit with it", time.monotonic())
        await watch

    def _hit_by(self, life: Incarnation) -> list[Attempt]:
        """What was under way with it and does not wait for a lease anyway."""
        return [each for each in self._attempts.values() if each.involves(life) and each.plan not in WAIT_FOR_LEASES]

    async def _watch(self, kind: str, life: Incarnation, affected: list[Attempt], began: float) -> None:
        """The time from a fault of `life` until the other side of every transfer that it hit was free."""
        if affected:
            await asyncio.gather(*(self._is_free(attempt, life) for attempt in affected))
            self.recoveries[kind].append(time.monotonic() - began)

    async def _is_free(self, attempt: Attempt, life: Incarnation) -> None:
        """Wait for the end of what the other side holds, if anything."""
        while True:
            ends = [opening.ended for opening in attempt.openings] if attempt.target is life else [attempt.ended]
            pending = [end for end in ends if not end.done()]
            if not pending:
                return
            await asyncio.wait(pending)

    # ---- the whole

    async def run(self) -> None:
        members = [member for some in self._members.values() for member in some]
        try:
            await asyncio.gather(*(member.start() for member in members))
            progress = asyncio.create_task(self._tell())
            early = asyncio.create_task(self._early())
            await asyncio.gather(*(self._worker() for _ in range(min(CONCURRENCY, self._num))))
            while self._acting:
                await asyncio.wait(self._acting)
            progress.cancel()
            early.cancel()
            await self._drain(members)
        finally:
            for member in members:
                member.now.thaw()
            await asyncio.gather(*(member.now.stop() for member in members))

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(10)
            print(f"{self._num_done} of {self._num}, {len(self.problems)} problems", file=sys.stderr, flush=True)

    async def _early(self) -> None:
        """What the processes that live through it all hold once everybody has met."""
        while self._num_done < self._num // 5:
            await asyncio.sleep(0.1)
        self.growth["early"] = await self._holdings()

    async def _holdings(self) -> dict[str, dict[str, Any]]:
        last = [some[-1] for some in self._members.values()]
        status = {member.name: await member.now.ask("status") for member in last}
        return {name: {key: each[key] for key in ("files", "threads")} for name, each in status.items()}

    async def _drain(self, members: list[Member]) -> None:
        """All is over: every block must be back, soon."""
        end_at = time.monotonic() + DRAIN_S
        while True:
            status = {member.name: await member.now.ask("status") for member in members}
            held = {
                name: each for name, each in status.items() if each["missing"] or each["open"] or each["quarantined"]
            }
            if not held or time.monotonic() > end_at:
                break
            await asyncio.sleep(0.1)
        self.num_leaked = sum(each["missing"] for each in status.values())
        self.growth["late"] = await self._holdings()
        for name, each in held.items():
            self.problems.append(f"{name} still has {each}")
        for name, late in self.growth["late"].items():
            more = sum(late["files"].values()) - sum(self.growth.get("early", {name: late})[name]["files"].values())
            if more > FILES_OF_LINKS + len(self.recoveries.get(START, ())) // 2:
                self.problems.append(f"{name} holds {more} more open files than at a fifth of the run")


def report(chaos: Chaos, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Print what came of it; the same as plain data."""
    print(f"{options.n} transfers, seed {options.seed}, {seconds:.0f} s, faults: {dict(chaos.faults)}")
    for outcome, count in chaos.outcomes.most_common():
        print(f"  {count:6}  {outcome}")
    print(f"committed over: {dict(chaos.transports)}")
    recoveries = {
        kind: {"times": len(times), "median_s": statistics.median(times), "longest_s": max(times)}
        for kind, times in sorted(chaos.recoveries.items())
    }
    for kind, each in recoveries.items():
        print(f"  {kind}: {each['times']} times, median {each['median_s']:.3f} s, longest {each['longest_s']:.3f} s")
    for when, holdings in chaos.growth.items():
        print(f"  held {when} by those never killed: {holdings}")
    for problem in chaos.problems[:20]:
        print(f"PROBLEM: {problem}")
    print(
        f"leaked blocks {chaos.num_leaked}, wrong blocks {chaos.num_wrong}, late writes {chaos.num_late}, "
        f"problems {len(chaos.problems)}"
    )
    return {
        "machine": machine(),
        "transfers": options.n,
        "seed": options.seed,
        "seconds": seconds,
        "faults": chaos.faults,
        "outcomes": chaos.outcomes,
        "transports": chaos.transports,
        "recoveries": recoveries,
        "growth": chaos.growth,
        "leaked_blocks": chaos.num_leaked,
        "wrong_blocks": chaos.num_wrong,
        "late_writes": chaos.num_late,
        "problems": chaos.problems,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=10_000, help="transfers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fault-every", type=int, default=40, help="transfers between one kill or freeze and the next")
    parser.add_argument("--corrupt", action="store_true", help="negative control: checks off, bits flipped")
    parser.add_argument("--leak", action="store_true", help="negative control: targets forget a release")
    parser.add_argument("--transports", type=lambda text: text.split(","), help="default: all that kvrelay has")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chaos, began = Chaos(options), time.monotonic()
    asyncio.run(chaos.run())
    figures = report(chaos, options, time.monotonic() - began)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if chaos.problems or chaos.num_leaked or chaos.num_wrong or chaos.num_late else 0


if __name__ == "__main__":
    sys.exit(main())
