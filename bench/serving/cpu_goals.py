"""From arrival times to figures, from figures to ratios, from both to Markdown. Pure."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bench.serving.cpu_load import Arrivals, Wave


@dataclass(frozen=True, slots=True)
class Cell:
    """What one peer did in one shape, in one round. Rates are tokens per second; None: could not be measured.

    `whole_rate`, by which peers are compared, is all output tokens over the time from the first request sent to the
    last token. `decode_rate` counts the tokens between the last request's first token and the first request's last one:
    all decode, none prefills. `prefill_rate` is the prompt's length over the time to its first token. `turn`: (round,
    repeat); cells of one turn and shape were measured right after each other.
    """

    peer: str
    kind: str  # "decode" or "prefill"
    size: int  # clients, or prompt tokens
    decode_rate: float | None = None
    whole_rate: float | None = None
    prefill_rate: float | None = None
    ttft_s: float | None = None
    is_cut: bool = False
    turn: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine can do at most, measured in the same run, and what a model asks of it."""

    read_gb_s: float
    gemm_gflop_s: float
    step_bytes: Mapping[str, float]  # by `weights`: what a decode step at one client reads
    prompt_operations: Mapping[int, float]  # by prompt length


def decode_rate(requests: Sequence[Arrivals]) -> float | None:
    """Tokens per second while every request decodes; None when there is no such time."""
    if not requests or any(not request.chunks_s for request in requests):
        return None
    begin_s = max(request.chunks_s[0] for request in requests)
    end_s = min(request.chunks_s[-1] for request in requests)
    if end_s <= begin_s:
        return None
    tokens = sum(
        request.tokens_per_chunk * sum(begin_s < at_s <= end_s for at_s in request.chunks_s) for request in requests
    )
    return tokens / (end_s - begin_s)


def decode_cell(peer: str, wave: Wave) -> Cell:
    requests = wave.requests
    begin_s = min(request.sent_s for request in requests)
    end_s = max((request.chunks_s[-1] for request in requests if request.chunks_s), default=begin_s)
    whole = sum(request.num_tokens for request in requests) / (end_s - begin_s) if end_s > begin_s else None
    firsts = [request.chunks_s[0] - request.sent_s for request in requests if request.chunks_s]
    ttft_s = statistics.median(firsts) if len(firsts) == len(requests) else None
    return Cell(peer, "decode", len(requests), decode_rate(requests), whole, ttft_s=ttft_s, is_cut=wave.is_cut)


def prefill_cell(peer: str, length: int, wave: Wave) -> Cell:
    request = wave.requests[0]
    if not request.chunks_s:
        return Cell(peer, "prefill", length, is_cut=True)
    ttft_s = request.chunks_s[0] - request.sent_s
    return Cell(peer, "prefill", length, prefill_rate=length / ttft_s, ttft_s=ttft_s)


class Spread(NamedTuple):
    """Of one figure over the rounds."""

    median: float
    least: float
    most: float

    def overlaps(self, other: "Spread") -> bool:
        return self.least <= other.most and other.least <= self.most


Key = tuple[str, str, int]  # peer, kind, size
FIGURES = ("whole_rate", "decode_rate", "prefill_rate", "ttft_s")


@dataclass(frozen=True, slots=True)
class Summary:
    """A peer in one shape, over the rounds; what could not be measured in any is not in `spreads`."""

    spreads: Mapping[str, Spread]
    is_cut: bool

    @property
    def rate(self) -> Spread | None:
        """Tokens per second by which peers are compared."""
        return self.spreads.get("whole_rate") or self.spreads.get("prefill_rate")


def summaries(cells: Iterable[Cell]) -> dict[Key, Summary]:
    """One for each peer and shape."""
    groups: dict[Key, list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.peer, cell.kind, cell.size), []).append(cell)
    return {key: _summary(group) for key, group in groups.items()}


def _summary(group: Sequence[Cell]) -> Summary:
    of_figure = {name: [value for cell in group if (value := getattr(cell, name)) is not None] for name in FIGURES}
    spreads = {
        name: Spread(statistics.median(values), min(values), max(values))
        for name, values in of_figure.items()
        if values
    }
    return Summary(spreads, any(cell.is_cut for cell in group))


@dataclass(frozen=True, slots=True)
class Ratio:
    """None: not measured. `is_none`: no difference was shown.

    Of medians over all rounds: their ranges overlap. Of turns: `spread` is over the rounds' medians, and holds 1.
    """

    value: float | None
    is_none: bool = False
    spread: Spread | None = None


def _pairs(shapes: Iterable[tuple[str, int]], weights: Mapping[str, str]) -> Iterator[tuple[str, Key, Key]]:
    """What is compared: each kvrelay in `weights` (peer -> "16 bits", "int8" or "int4") with each peer of the same
    weights.
    """
    for kind, size in sorted(set(shapes)):
        for ours, held in weights.items():
            for peer in weights if ours.startswith("kvrelay") else ():
                if weights[peer] == held and not peer.startswith("kvrelay"):
                    yield f"{_name(kind, size)}: {ours} over {peer}", (ours, kind, size), (peer, kind, size)


def _over(ours: Summary | None, theirs: Summary | None) -> Ratio:
    one, other = ours and ours.rate, theirs and theirs.rate
    return Ratio(one.median / other.median, one.overlaps(other)) if one and other else Ratio(None)


def ratios(found: Mapping[Key, Summary], weights: Mapping[str, str]) -> dict[str, Ratio]:
    """Of every shape in `found`, of medians."""
    pairs = _pairs(((kind, size) for _, kind, size in found), weights)
    return {name: _over(found.get(ours), found.get(theirs)) for name, ours, theirs in pairs}


def ratios_of_turns(cells: Iterable[Cell], weights: Mapping[str, str]) -> dict[str, Ratio]:
    """Of every shape in `cells`: two peers are compared within a turn only, so that a machine whose speed drifts slows
    both.
    """
    rates: dict[Key, dict[tuple[int, int], float]] = {}
    for cell in cells:
        if rate := cell.whole_rate or cell.prefill_rate:
            rates.setdefault((cell.peer, cell.kind, cell.size), {})[cell.turn] = rate
    out: dict[str, Ratio] = {}
    for name, ours, theirs in _pairs(((kind, size) for _, kind, size in rates), weights):
        one, other = rates.get(ours, {}), rates.get(theirs, {})
        rounds: dict[int, list[float]] = {}
        for turn in one.keys() & other.keys():
            rounds.setdefault(turn[0], []).append(one[turn] / other[turn])
        medians = [statistics.median(values) for values in rounds.values()]
        spread = Spread(statistics.median(medians), min(medians), max(medians)) if medians else None
        out[name] = Ratio(spread.median, spread.least <= 1 <= spread.most, spread) if spread else Ratio(None)
    return out


def shares(found: Mapping[Key, Summary], weights: Mapping[str, str], limits: Limits) -> dict[str, float]:
    """Each kvrelay's share of the machine's limits: of the memory's while one client decodes, of the GEMM's in prompts.

    Above 1 the bench is wrong: it has not seen the machine at its best.
    """
    out: dict[str, float] = {}
    for (peer, kind, size), summary in sorted(found.items()):
        if not peer.startswith("kvrelay") or peer.endswith("drafting"):
            continue
        if kind == "prefill" and peer == "kvrelay" and (rate := summary.rate):
            peak = limits.gemm_gflop_s * 1e9 / limits.prompt_operations[size] * size
            out[f"{_name(kind, size)}: {peer}, share of the GEMM peak"] = rate.median / peak
        elif (kind, size) == ("decode", 1) and (rate := summary.spreads.get("decode_rate")):
            most = limits.read_gb_s * 1e9 / limits.step_bytes[weights[peer]]
            out[f"{_name(kind, size)}: {peer}, share of the memory's limit"] = rate.median / most
    return out


def _name(kind: str, size: int) -> str:
    clients = "1 client" if size == 1 else f"{size} clients"
    return f"decode, {clients}" if kind == "decode" else f"prefill, {size} tokens"


# ---- Markdown


def _number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _range(spread: Spread | None, digits: int = 1, factor: float = 1.0) -> str:
    if spread is None:
        return "–"
    median, least, most = (_number(factor * value, digits) for value in spread)
    return f"{median} ({least}–{most})"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def rates_table(found: Mapping[Key, Summary], peers: Sequence[str], kind: str, unit: str) -> str:
    """Peers down, sizes across: tokens/s (of decode over the whole wave), median TTFT in ms."""
    sizes = sorted({size for _, one, size in found if one == kind})

    def entry(peer: str, size: int) -> str:
        cell = found.get((peer, kind, size))
        if cell is None:
            return "–"
        ttft = cell.spreads.get("ttft_s")
        text = f"{_range(cell.rate)} / {_number(1000 * ttft.median if ttft else None, 0)}"
        return text + (" (cut)" if cell.is_cut else "")

    return table(
        ["", *(f"{size} {unit}" for size in sizes)], ([peer, *(entry(peer, size) for size in sizes)] for peer in peers)
    )


def ratios_table(found: Mapping[str, Ratio], shares: Mapping[str, float]) -> str:
    rows = [
        [text, (_range(one.spread, 2) if one.spread else _number(one.value, 2)) + (", no difference" * one.is_none)]
        for text, one in found.items()
    ]
    rows += [
        [text, f"{100 * share:.0f} %" + (": AN ERROR OF THE BENCH" if share > 1 else "")]
        for text, share in shares.items()
    ]
    return table(["", "ratio"], rows)
