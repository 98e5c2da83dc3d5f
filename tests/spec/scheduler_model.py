"""What tests/spec/scheduler_life.py knows of a sequence, and the bounds that an order of service is held to."""

from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.engine.sequence import Sequence, State


@dataclass(eq=False)
class Record:
    """What the model knows of a sequence. `keys`: one for each token, which stands for all tokens up to it."""

    seq: Sequence
    state: State
    is_reservation: bool
    keys: list[int]
    hold: bool = False  # its blocks are wanted by a transfer when it has ended
    was_admitted: bool = False
    outputs: int = 0
    num_overtaken: int = 0  # later arrivals of the same line that came in before it

    @property
    def tokens_left(self) -> int:
        """Upper bound of what is still to be computed, from nothing, to its end."""
        return self.seq.request.num_prompt_tokens + self.seq.max_output


def first_come_first_served(waiting: Record) -> int:
    """How many later arrivals of its line may come in before this one."""
    return 0


def steps_until_all_end(records: list[Record]) -> int:
    """In how many steps all of these come to an end when nobody else has blocks: the oldest one gains a token in each."""
    return sum(record.tokens_left + 3 for record in records) + 3


def the_latest_arrivals_give_way(victims: list[Sequence], staying: list[Sequence]) -> bool:
    """Whether these victims are the right ones."""
    return min(seq.arrival for seq in victims) > max((seq.arrival for seq in staying), default=0)


@dataclass
class Rules:
    """The order of service that the life is held to; another order has other bounds."""

    most_overtakers: Callable[[Record], int] = first_come_first_served
    steps_to_end: Callable[[list[Record]], int] = steps_until_all_end
    steps_in_line: Callable[[list[Record]], int] = steps_until_all_end  # of these, the last is admitted by then
    are_victims: Callable[[list[Sequence], list[Sequence]], bool] = the_latest_arrivals_give_way


def key_after(key: int, token: int) -> int:
    return hash((key, token))


def keys_of(salt: str, ids: list[int]) -> list[int]:
    keys, key = [], hash(("salt", salt == ""))
    for token in ids:
        key = key_after(key, token)
        keys.append(key)
    return keys


ROLES = ("prefill", "decode", "both")
RESERVED = {"prefill": 0.0, "decode": 0.8, "both": 0.4}  # the share of arrivals whose KV comes from elsewhere
# what happens, and how often beside the rest
_COMMON = {
    "arrive": 16,
    "compute": 50,
    "abort": 4,
    "lend": 2,
    "take_back": 4,
    "tick": 3,
    "end_pins": 0.2,
    "siege": 0.4,
    "all_end": 0.3,
}
_IN = {"grant": 16, "transfer_lands": 14, "transfer_is_lost": 3, "transport_lets_go": 5}
_OUT = {"transfer_out_ends": 14}
KINDS = {
    role: (list(kinds), list(kinds.values()))
    for role, kinds in {"prefill": _COMMON | _OUT, "decode": _COMMON | _IN, "both": _COMMON | _IN | _OUT}.items()
}
