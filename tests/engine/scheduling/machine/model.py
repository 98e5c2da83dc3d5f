"""What tests/engine/scheduling/machine/life.py knows of a sequence, and the bounds that an order of service is held
to.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.engine.scheduling.sequence import Sequence, State
from tests.engine.scheduling.machine.setup import BESIEGING


@dataclass(eq=False)
class Record:
    """What the model knows of a sequence. `keys`: one for each token, which stands for all tokens up to it."""

    seq: Sequence
    state: State
    is_reservation: bool
    keys: list[int]
    hold: bool = False  # its blocks are wanted by a transfer when it has ended
    was_admitted: bool = False
    num_overtaken: int = 0  # later arrivals of the same line that came in before it
    num_before: int = 0  # in its line when it got in, and earlier arrivals that came again since
    num_admitted_since: int = 0  # of its line, since it got in
    paid: int = 0  # tokens that its tenant need not pay for any more

    @property
    def is_reserving(self) -> bool:
        """Whether its line is the one for reservations; who was begun comes again to the other."""
        return self.is_reservation and not self.was_admitted

    @property
    def tokens_left(self) -> int:
        """Upper bound of what is still to be computed, from nothing, to its end; a leader's for all its members."""
        group = self.seq.group
        count = group.request.group.num_sequences if group is not None and self.seq is group.leader else 1
        return self.seq.request.num_prompt_tokens + count * (self.seq.max_output + 3)


def first_come_first_served(waiting: Record) -> int:
    """How many later arrivals of its line may come in before this one."""
    return 0


def steps_until_all_end(records: list[Record]) -> int:
    """In how many steps all of these come to an end when nobody else has blocks: the first gains a token in each."""
    return sum(record.tokens_left for record in records) + 3


@dataclass
class Rules:
    """The bounds that an order of service is held to, beside that of admissions, which every line has."""

    most_overtakers: Callable[[Record], int] = first_come_first_served
    steps_to_end: Callable[[list[Record]], int] = steps_until_all_end
    steps_in_line: Callable[[list[Record]], int] = steps_until_all_end  # of these, the last is admitted by then


def by_classes(oldest_every: int) -> Rules:
    """Priorities, deadlines and tenants go before arrival; under a siege, each admission may have to wait for an
    end.
    """

    def steps_in_line(records: list[Record]) -> int:
        return steps_until_all_end(records) + oldest_every * (len(records) + 1) * (BESIEGING + 3)

    return Rules(most_overtakers=lambda record: 1 << 30, steps_in_line=steps_in_line)


def key_after(key: int, token: int) -> int:
    return hash((key, token))


def keys_of(salt: str, ids: list[int]) -> list[int]:
    keys, key = [], len(salt)
    for token in ids:
        key = key_after(key, token)
        keys.append(key)
    return keys


ROLES = ("decode", "prefill", "decode", "both")  # who decodes has the most to decide
RESERVED = {"prefill": 0.0, "decode": 0.8, "both": 0.4}  # the share of arrivals whose KV comes from elsewhere
# what happens, and how often beside the rest
_COMMON = {
    "arrive": 16,
    "compute": 54,
    "abort": 3,
    "abort_choice": 2,
    "preempt": 4,
    "rot": 3,
    "take_probe_blocks": 2,
    "return_probe_blocks": 4,
    "tick": 3,
    "end_pins": 0.2,
    "siege": 0.6,
    "all_end": 0.3,
}
_IN = {"grant": 16, "transfer_lands": 14, "transfer_is_lost": 3, "transport_lets_go": 5}
_OUT = {"transfer_out_ends": 14}
KINDS = {
    role: (list(kinds), list(kinds.values()))
    for role, kinds in {"prefill": _COMMON | _OUT, "decode": _COMMON | _IN, "both": _COMMON | _IN | _OUT}.items()
}
