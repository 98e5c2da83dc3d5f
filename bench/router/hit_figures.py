"""What bench/router/live_routing.py counts: an oracle's pools, what the index claimed and what was there, one policy's
requests. No measuring.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrelay.plane import messages as wire
from kvrelay.router.types import Decision
from kvrelay.serve.telemetry.explain import Explain


class Recent:
    """Blocks of one pool, the least recently used first out; of a prompt its end before its beginning."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[object, None] = OrderedDict()

    def depth(self, chain: Sequence[bytes]) -> int:
        """Leading blocks of it that are here."""
        return next((index for index, block in enumerate(chain) if block not in self._blocks), len(chain))

    def add(self, chain: Sequence[object]) -> None:
        for block in reversed(chain):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Routed:
    """One decision, in tokens of its prompt that need not be computed: of the chosen worker's and of the best one's
    pool.
    """

    decision: Decision
    chosen: int
    best: int

    @property
    def worker(self) -> str:
        """The worker that computes the prompt."""
        worker = self.decision.prefill or self.decision.decode
        assert worker is not None
        return worker


@dataclass(frozen=True, slots=True)
class Looked:
    """One worker's pool and one prompt, in leading blocks; see index_watch.py."""

    claimed: int
    published: int
    held: int
    is_changing: bool  # what follows those is being taken or given up

    @property
    def fault(self) -> int:
        """Blocks that the index has too many (below 0: too few) of, whatever is on its way."""
        wrong = self.published - self.held
        return 0 if self.is_changing and wrong > 0 else wrong

    @property
    def late(self) -> int:
        """Blocks that were claimed and not held (below 0: held and not claimed), with all events in order: some were on
        their way.
        """
        return 0 if self.fault else self.claimed - self.held


def looked(claimed: int, published: int, tiers: Sequence[int]) -> Looked:
    """`tiers`: a worker's answer, of the prompt's blocks in order."""
    held = next((index for index, tier in enumerate(tiers) if tier != wire.IN_POOL), len(tiers))
    return Looked(claimed, published, held, held < len(tiers) and tiers[held] == wire.CHANGING)


@dataclass(slots=True)
class Deviation:
    """How often so many tokens too many, or too few, were claimed."""

    too_many: list[int] = field(default_factory=list)
    too_few: list[int] = field(default_factory=list)

    def note(self, tokens: int) -> None:
        """`tokens`: those claimed less those there."""
        if tokens:
            (self.too_many if tokens > 0 else self.too_few).append(abs(tokens))

    def cells(self, name: str) -> dict[str, str]:
        return {f"{name} {sign}": counted(found) for sign, found in (("+", self.too_many), ("-", self.too_few))}


def counted(tokens: Sequence[int]) -> str:
    """How many, and how many tokens in all."""
    return f"{len(tokens)} ({sum(tokens)})"


@dataclass(slots=True)
class Tally:
    """One policy's requests. Tokens."""

    block_size: int
    prompt: int = 0
    hits: int = 0
    held: int = 0
    chosen: int = 0
    best: int = 0
    short: list[int] = field(default_factory=list)  # by how many, for each such request
    ttft_s: list[float] = field(default_factory=list)
    local: int = 0
    failed: int = 0
    retried: int = 0
    claims: int = 0
    faults: Deviation = field(default_factory=Deviation)
    late: Deviation = field(default_factory=Deviation)
    begun: Deviation = field(default_factory=Deviation)
    promised: int = (
        0  # of those that were too many at the begin: in the pool was what the index said, on the way was more
    )
    odd: list[dict[str, Any]] = field(default_factory=list)  # requests of which something was not as claimed

    def answered(self, routed: Routed, num_tokens: int, explain: Explain) -> None:
        """A request has its first token."""
        cached = explain.cached_tokens
        self.prompt += num_tokens
        self.hits += cached
        self.chosen += routed.chosen
        self.best += routed.best
        if routed.chosen > cached:
            self.short.append(routed.chosen - cached)
        self.local += routed.decision.path == "local"
        self.ttft_s.append(explain.ttft_us() / 1e6)
        self.retried += len(explain.decisions) > 1

    def claimed(self, looks: Sequence[Looked]) -> None:
        """What the index claimed of each worker when a request was routed."""
        self.claims += len(looks)
        for one in looks:
            self.faults.note(one.fault * self.block_size)
            self.late.note(one.late * self.block_size)

    def began(self, routed: Routed, look: Looked | None, cached: int) -> None:
        """What the router expected of a prefill, against what that found in whole blocks when it began."""
        expected, found = routed.decision.cached_tokens_prefill, cached // self.block_size
        wrong = expected - found * self.block_size
        self.begun.note(wrong)
        self.promised += wrong > 0 and look is not None and found >= look.claimed
        self.held += look.held * self.block_size if look is not None else 0
        if wrong or routed.chosen > cached or (look is not None and (look.fault or look.late)):
            self.odd.append(
                {
                    "request": routed.decision.request_id, "path": routed.decision.path, "worker": routed.worker,
                    "expected": expected, "found": cached, "chosen": routed.chosen,
                    "claimed, published, held": None if look is None else [look.claimed, look.published, look.held],
                }
            )  # fmt: skip

    def row(self, policy: str) -> dict[str, Any]:
        def share(tokens: int) -> str:
            return f"{tokens / max(1, self.prompt):.1%}"

        times = sorted(self.ttft_s)
        return {
            "policy": policy, "requests": len(times), "hits": share(self.hits), "held": share(self.held),
            "chosen": share(self.chosen), "best": share(self.best), "short": counted(self.short), "local": self.local,
            "TTFT s": times[len(times) // 2] if times else None,
            "p90": times[int(0.9 * len(times))] if times else None, "failed": self.failed, "retried": self.retried,
        }  # fmt: skip

    def index_row(self, policy: str) -> dict[str, Any]:
        row: dict[str, Any] = {"policy": policy, "claims": self.claims}
        for name, off in (("fault", self.faults), ("late", self.late), ("begun", self.begun)):
            row |= off.cells(name)
        return row | {"on the way": self.promised}

    @property
    def is_sound(self) -> bool:
        """Whether the index was what the workers had published, each time."""
        return not (self.faults.too_many or self.faults.too_few)
