"""From arrival times to figures, from figures to ratios, from both to Markdown. Pure."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.serving.cpu_load import Arrivals, Wave


@dataclass(frozen=True, slots=True)
class Cell:
    """What one peer did in one shape, in one round. Rates are tokens per second; None: could not be measured.

    `decode_rate` counts the tokens between the last request's first token and the first request's last one: all decode,
    none prefills. `whole_rate` is all output tokens over the time from sending to the last one. `prefill_rate` is the
    prompt's length over the time to its first token.
    """

    peer: str
    kind: str  # "decode" or "prefill"
    size: int  # clients, or prompt tokens
    decode_rate: float | None = None
    whole_rate: float | None = None
    prefill_rate: float | None = None
    ttft_s: float | None = None
    is_cut: bool = False


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


def medians(cells: Iterable[Cell]) -> dict[tuple[str, str, int], Cell]:
    """One cell for each peer and shape: medians over the rounds."""
    groups: dict[tuple[str, str, int], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.peer, cell.kind, cell.size), []).append(cell)
    return {key: _median(group) for key, group in groups.items()}


def _median(group: Sequence[Cell]) -> Cell:
    def middle(name: str) -> float | None:
        values = [value for cell in group if (value := getattr(cell, name)) is not None]
        return statistics.median(values) if values else None

    first = group[0]
    figures = {name: middle(name) for name in ("decode_rate", "whole_rate", "prefill_rate", "ttft_s")}
    return Cell(first.peer, first.kind, first.size, **figures, is_cut=any(cell.is_cut for cell in group))


def ratio(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours is not None and theirs else None


def ours_of(weights: str) -> str:
    """The kvrelay that is compared with peers of these weights."""
    return "kvrelay" if weights == "16 bits" else f"kvrelay {weights}"


def ratios(
    found: Mapping[tuple[str, str, int], Cell], weights: Mapping[str, str], limits: Limits | None
) -> dict[str, float | None]:
    """Of every shape in `found`: kvrelay over each peer in `weights` (peer -> "16 bits", "int8" or "int4"), and its
    share of the machine's limits. None: not measured.
    """

    def rate(peer: str, kind: str, size: int) -> float | None:
        cell = found.get((peer, kind, size))
        return None if cell is None else getattr(cell, f"{kind}_rate")

    out: dict[str, float | None] = {}
    shapes = sorted({(kind, size) for _, kind, size in found})
    for kind, size in shapes:
        for peer, held in weights.items():
            if (ours := ours_of(held)) in weights and not peer.startswith("kvrelay"):
                out[f"{_name(kind, size)}: {ours} over {peer}"] = ratio(rate(ours, kind, size), rate(peer, kind, size))
    for held, read_bytes in limits.step_bytes.items() if limits else ():
        assert limits is not None
        if ours_of(held) in weights and ("decode", 1) in shapes:
            share = ratio(rate(ours_of(held), "decode", 1), limits.read_gb_s * 1e9 / read_bytes)
            out[f"decode, 1 client: {ours_of(held)}, share of the memory's limit"] = share
    for kind, size in shapes if limits and "kvrelay" in weights else ():
        if kind == "prefill" and limits:
            peak = limits.gemm_gflop_s * 1e9 / limits.prompt_operations[size] * size
            out[f"{_name(kind, size)}: kvrelay, share of the GEMM peak"] = ratio(rate("kvrelay", kind, size), peak)
    return out


def _name(kind: str, size: int) -> str:
    clients = "1 client" if size == 1 else f"{size} clients"
    return f"decode, {clients}" if kind == "decode" else f"prefill, {size} tokens"


# ---- Markdown


def _number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def rates_table(found: Mapping[tuple[str, str, int], Cell], peers: Sequence[str], kind: str, unit: str) -> str:
    """Peers down, sizes across. Decode: decode tokens/s, over the whole wave, TTFT; prefill: tokens/s, TTFT."""
    sizes = sorted({size for _, one, size in found if one == kind})

    def entry(peer: str, size: int) -> str:
        cell = found.get((peer, kind, size))
        if cell is None:
            return "–"
        rates = [cell.decode_rate, cell.whole_rate] if kind == "decode" else [cell.prefill_rate]
        text = " / ".join(map(_number, rates)) + f" / {_number(cell.ttft_s and 1000 * cell.ttft_s, 0)}"
        return text + (" (cut)" if cell.is_cut else "")

    return table(
        ["", *(f"{size} {unit}" for size in sizes)], ([peer, *(entry(peer, size) for size in sizes)] for peer in peers)
    )


def ratios_table(found: Mapping[str, float | None]) -> str:
    return table(["", "ratio"], ([text, _number(figure, 2)] for text, figure in found.items()))
