"""What a random life of the scheduler is given: the size of everything, the order of service, a swap area, and its
requests.
"""

import random
from dataclasses import dataclass, field

from kvrelay.engine.scheduling.fair_share import QueueRules
from kvrelay.engine.scheduling.preempt import PreemptionMode
from kvrelay.hashing import block_hashes
from kvrelay.plane.messages import Beams, Group, KvHints, Sampling, SequenceRequest

SIZE = 6  # tokens of a block: long enough for a beginning that is worth copying
BUDGET, WAITING = 12, 6
LONGEST = 30  # tokens of a prompt
BESIEGING = 12  # tokens of a request that comes during a siege, at most
FOR_EVER = 1e9  # weighted tokens: more than any tenant gets in a life
END_TOKEN = 3  # of beams


@dataclass(frozen=True)
class Setup:
    """Drawn when a life begins; all of it may come together."""

    num_blocks: int = 11
    num_sequences: int = 4
    has_classes: bool = False  # priorities, tenants, weights, deadlines
    line: QueueRules = field(default_factory=QueueRules)
    weights: dict[str, float] = field(default_factory=dict)  # by tenant; others have 1
    has_groups: bool = False
    num_rows: int | None = None  # of the swap area
    is_checked: bool = True
    only: PreemptionMode | None = None
    headroom: float = 0.0

    @property
    def counts_exactly(self) -> bool:
        """Whether nobody is ever lifted, so that a tenant's counter is what was computed for it."""
        return not self.has_classes or self.line.credit_tokens == FOR_EVER


def draw(rng: random.Random) -> Setup:
    has_classes, has_groups = rng.random() < 0.5, rng.random() < 0.6
    rules = QueueRules(oldest_every=rng.choice((1, 3, 3, 16)), credit_tokens=rng.choice((0.0, 40.0, FOR_EVER)))
    return Setup(
        num_blocks=11 if has_groups else rng.choice((8, 11)),
        num_sequences=rng.choice((2, 4, 4, 6)),
        has_classes=has_classes,
        line=rules if has_classes else QueueRules(),
        weights={"a": 2.0} if has_classes else {},
        has_groups=has_groups,
        num_rows=rng.choice((None, None, 3, 8, 40)),
        is_checked=rng.random() < 0.8,
        only=rng.choice((None, PreemptionMode.SWAP, PreemptionMode.SWAP, PreemptionMode.RECOMPUTE)),
        headroom=rng.choice((0.0, 0.0, 1.0)),
    )


class Requests:
    """Draws what comes in; many go on from another's beginning."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.count = setup, 0

    def draw(self, rng: random.Random, known: list[list[int]], longest: int, *, is_siege: bool) -> SequenceRequest:
        self.count += 1
        group = self._group(rng) if self.setup.has_groups and not is_siege and rng.random() < 0.6 else None
        beams = None if group is None else group.beams
        longest = min(longest, 12) if beams is not None else longest
        ids = [rng.randrange(2) for _ in range(rng.randint(1, longest))]
        if known and rng.random() < 0.6:
            ids = [*(same := rng.choice(known)[: rng.randint(1, longest)]), *ids[: longest - len(same)]]
        num_prompt = len(ids) if group is not None else rng.randint(max(1, len(ids) - 3), len(ids))
        salt = rng.choice(("", "", "b"))
        hints = KvHints(
            keep=rng.random() < 0.9,
            priority=rng.choice((0, 0, 1)),
            pin_s=rng.choice((0.0, 0.0, 0.0, 4.0)),
            session=rng.choice(("", "s")),
        )
        more = rng.choice((1, 3, 8, 12)) if beams is not None else 6 if is_siege else rng.choice((1, 6, 18, 30, 40))
        emitted = max(map(len, group.emitted), default=0) if group is not None else len(ids) - num_prompt
        sampling = Sampling(
            max_tokens=emitted + more,
            seed=rng.randrange(1 << 30),
            prompt_logprobs=0 if rng.random() < 0.1 else None,
            stop_token_ids=(END_TOKEN,) if beams is not None and rng.random() < 0.5 else (),
        )
        return SequenceRequest(
            request_id=f"r{self.count}",
            token_ids=ids,
            num_prompt_tokens=num_prompt,
            salt=salt,
            hints=hints,
            group=group,
            block_hashes=list(block_hashes(ids, SIZE, salt)) if rng.random() < 0.8 else [],
            sampling=sampling,
            **(self._class(rng, is_siege) if self.setup.has_classes else {}),
        )

    def _class(self, rng: random.Random, is_siege: bool) -> dict:
        priority, tenant = -2 if is_siege else rng.choice((-1, 0, 0, 0, 2)), rng.choice("aabcccccc")
        return {
            "priority": priority,
            "tenant": tenant,
            "weight": self.setup.weights.get(tenant, 1.0),
            "deadline_s": rng.choice((None, None, None, 3.0, 12.0)),
        }

    def _group(self, rng: random.Random) -> Group:
        most = min(3, self.setup.num_sequences)
        if rng.random() < 0.4:
            width = rng.randint(1, most)
            return Group(
                beams=Beams(
                    width=width, num_returned=rng.randint(1, width), early_stopping=rng.choice((True, False, "never"))
                )
            )
        seeds = tuple(rng.randrange(1 << 30) for _ in range(rng.randint(1, most + 1)))
        if rng.random() < 0.8:
            return Group(seeds=seeds)
        emitted = [
            [token_of(seed, index) for index in range(rng.randrange(4))] for seed in seeds
        ]  # by a worker that died
        ended = tuple(k for k in range(1, len(seeds)) if not rng.randrange(3))
        return Group(seeds=seeds, emitted=emitted, ended=ended)


def token_of(seed: int, index: int) -> int:
    """Token `index` of an output depends on its seed and place alone."""
    return hash((seed, index)) >> 5 & 1
