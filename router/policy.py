"""The choice: which pair (P, D), or which single worker, has the least cost. `rank` finds the best, `decision_of` tells one in full.

Never imports torch, Ray, sockets, a clock or a random source. Rules:
- A worker that can never hold the request, is excluded, or whose line is full, is no candidate.
- A pair that is known to misfit is no candidate; a worker that fits nobody is left out before (see misfits.py).
- A decode worker that lacks at most `local_prefill_tokens` of the prompt computes it itself.
- Otherwise the least sum of terms wins, over all pairs of the shortlists and every local choice.
- Equal scores (to a microsecond) go to the worker chosen longest ago, then by id.
"""

import heapq
from collections.abc import Callable, Sequence
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from kvrelay.config import RouterSettings
from kvrelay.router.cost import (
    CostModel,
    DecodeTerms,
    PrefillTerms,
    decode_terms,
    prefill_terms,
    stall_term,
    transfer_term,
)
from kvrelay.router.misfits import Misfits
from kvrelay.router.types import (
    TERM_NAMES,
    TTFT_TERMS,
    CandidateScore,
    Decision,
    Path,
    Refusal,
    RefusalReason,
    RouteRequest,
    WorkerLoad,
)

SHORTLIST = 6
"""Workers of each role that are paired in full."""
MAX_CANDIDATES = 16
"""Ways that a decision lists, best first."""
MIN_RETRY_S, MAX_RETRY_S = 1.0, 30.0


class Option(NamedTuple):
    """A worker, the prompt tokens that it holds for certain, and those that it will hold by the time it computes."""

    load: WorkerLoad
    held_tokens: int
    coming_tokens: int


class Context(NamedTuple):
    """What is the same for every candidate."""

    request: RouteRequest
    settings: RouterSettings
    model: CostModel
    max_waiting: int
    prefill_rate: float  # tokens/s of a worker that has not measured its own
    pressure: int
    misfits: Misfits = MappingProxyType({})


class _Computing(NamedTuple):
    """One worker as the one that computes the prompt."""

    option: Option
    uncached_tokens: int
    work: PrefillTerms
    is_near: bool  # lacks at most local_prefill_tokens


class _Decoding(NamedTuple):
    """One decode worker as the one that decodes; `local` if it computes the prompt too."""

    parts: DecodeTerms
    lacking_tokens: int  # whose KV would have to travel to it
    local: _Computing


_Side = TypeVar("_Side", _Computing, _Decoding)


class Scored(NamedTuple):
    """A candidate and its sort key."""

    key: tuple[float, int, int, str, str]  # score, when last chosen, prefill worker or "", decode worker or ""
    parts: tuple[float, ...]  # of TERM_NAMES
    compute: _Computing
    decode: _Decoding | None

    @property
    def way(self) -> tuple[str | None, str | None]:
        """(prefill worker, decode worker); None: there is none."""
        return self.key[3] or None, self.key[4] or None


def rank(ctx: Context, prefills: Sequence[Option], decodes: Sequence[Option]) -> list[Scored] | Refusal:
    """The cheapest ways, best first, or why there is none. `prefills` and `decodes` are all the live workers of each role."""
    request = ctx.request
    usable_p = _usable(ctx, prefills, needs_output=False)
    usable_d = _usable(ctx, decodes, needs_output=True)
    if usable_p and request.force != "local":
        shortest = min(option.load.queued_requests for option in usable_p)
        ctx = ctx._replace(pressure=min(shortest, ctx.model.max_pressure))
    scored = _candidates(ctx, usable_p, usable_d)
    if not scored:
        wants_prefill = request.force == "remote" and (not request.needs_decode or bool(usable_d))
        role = "prefill" if wants_prefill else "decode"
        return _refusal(ctx, role, prefills if wants_prefill else decodes)
    return heapq.nsmallest(MAX_CANDIDATES, scored, key=itemgetter(0))


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _fits(ctx: Context, load: WorkerLoad, *, needs_output: bool) -> bool:
    """Whether an otherwise empty worker could hold it. Output beyond the context is the worker's to cut."""
    request = ctx.request
    if request.num_tokens + (request.max_tokens > 1) > load.max_model_len:
        return False
    output = request.max_tokens if needs_output and request.needs_decode else 1
    return _blocks(min(request.num_tokens + output, load.max_model_len), load.block_size) <= load.num_blocks


def _usable(ctx: Context, options: Sequence[Option], *, needs_output: bool) -> list[Option]:
    return [
        option
        for option in options
        if option.load.worker_id not in ctx.request.excluded
        and option.load.waiting < ctx.max_waiting
        and _fits(ctx, option.load, needs_output=needs_output)
    ]


def _candidates(ctx: Context, prefills: list[Option], decodes: list[Option]) -> list[Scored]:
    """Every way that is scored in full."""
    request = ctx.request
    computing = [_computing(ctx, p) for p in prefills] if request.force != "local" else []
    best_p = _shortest(ctx, computing, lambda c: sum(c.work), lambda c: c.option.load)
    if not request.needs_decode and best_p:
        return [_score(ctx, c, None) for c in best_p]
    decoding = [_decoding(ctx, d) for d in decodes]
    targets = _best_targets(ctx, decoding)
    if request.force == "remote":
        return [_score(ctx, c, d) for d in targets for c in best_p if _may_pair(ctx, c, d)]
    scored = [_score(ctx, c, d) for d in targets if not d.local.is_near for c in best_p if _may_pair(ctx, c, d)]
    scored += [
        _score(ctx, d.local, d)
        for d in _shortest(ctx, decoding, lambda d: _local_cost(ctx, d), lambda d: d.local.option.load)
    ]
    return scored


def _may_pair(ctx: Context, compute: _Computing, decode: _Decoding) -> bool:
    if not ctx.misfits:
        return True
    return (compute.option.load.worker_id, decode.local.option.load.worker_id) not in ctx.misfits


def _shortest(
    ctx: Context, sides: list[_Side], cost: Callable[[_Side], float], load_of: Callable[[_Side], WorkerLoad]
) -> list[_Side]:
    """The SHORTLIST cheapest; ties as for the final choice. All while some pairs misfit: the cheapest may be those."""
    if len(sides) <= SHORTLIST or ctx.misfits:
        return sides
    keyed = []
    for side in sides:
        load = load_of(side)
        keyed.append((round(cost(side), 6), load.turn, load.worker_id, side))
    return [side for _, _, _, side in heapq.nsmallest(SHORTLIST, keyed)]


def _computing(ctx: Context, option: Option) -> _Computing:
    """The prompt computed by this worker: at least its last token, whose logits give the first output token."""
    num_tokens, block_size = ctx.request.num_tokens, option.load.block_size
    usable = (num_tokens - 1) // block_size * block_size
    uncached = num_tokens - min(max(option.held_tokens, option.coming_tokens), usable)
    work = prefill_terms(option.load, uncached_tokens=uncached, pressure=ctx.pressure, rate=ctx.prefill_rate)
    return _Computing(option, uncached, work, uncached <= ctx.settings.local_prefill_tokens)


def _decoding(ctx: Context, option: Option) -> _Decoding:
    """The output decoded by this worker, with what computing the prompt there would be."""
    return _Decoding(_decode_parts(ctx, option), ctx.request.num_tokens - option.held_tokens, _computing(ctx, option))


def _decode_parts(ctx: Context, option: Option) -> DecodeTerms:
    request = ctx.request
    grown = request.num_tokens + min(request.max_tokens, ctx.model.expected_output_tokens)
    block_size = option.load.block_size
    num_others = request.width - 1  # of a group: they share the prompt's full blocks
    held, shared = option.held_tokens // block_size, request.num_tokens // block_size
    return decode_terms(
        option.load,
        blocks_now=_blocks(request.num_tokens + 1, block_size) - held + num_others,
        blocks_later=_blocks(grown, block_size) - held + num_others * (_blocks(grown, block_size) - shared),
        model=ctx.model,
    )


def _best_targets(ctx: Context, decoding: list[_Decoding]) -> list[_Decoding]:
    """The decode workers that a prefill worker might send to: cheapest load, memory and bytes."""

    def cost(side: _Decoding) -> float:
        load = side.local.option.load
        moved = transfer_term(load, load, tokens=side.lacking_tokens, compute_s=float("inf"), model=ctx.model)
        return sum(side.parts) + moved

    return _shortest(ctx, decoding, cost, lambda side: side.local.option.load)


def _stall(ctx: Context, side: _Computing) -> float:
    """A prompt within local_prefill_tokens rides along with a decode step: it stalls nobody."""
    return 0.0 if side.is_near else stall_term(side.option.load, compute_s=side.work.compute, model=ctx.model)


def _local_cost(ctx: Context, side: _Decoding) -> float:
    return sum(side.local.work) + sum(side.parts) + _stall(ctx, side.local)


def _score(ctx: Context, compute: _Computing, decode: _Decoding | None) -> Scored:
    """One way in full. `decode` None: only the first token is wanted; `compute` its own: local."""
    source = compute.option.load
    work = compute.work
    if decode is None:
        parts = (*work, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        return Scored((round(sum(parts), 6), source.turn, 0, source.worker_id, ""), parts, compute, None)
    target = decode.local.option.load
    if compute is decode.local:
        parts = (*work, 0.0, 0.0, *decode.parts, _stall(ctx, compute))
        return Scored((round(sum(parts), 6), source.turn, target.turn, "", target.worker_id), parts, compute, decode)
    moved = transfer_term(source, target, tokens=decode.lacking_tokens, compute_s=work.compute, model=ctx.model)
    parts = (*work, ctx.model.handoff_s, moved, *decode.parts, 0.0)
    key = (round(sum(parts), 6), source.turn, target.turn, source.worker_id, target.worker_id)
    return Scored(key, parts, compute, decode)


def _candidate(scored: Scored) -> CandidateScore:
    prefill, decode = scored.way
    path: Path = "prefill_only" if decode is None else "local" if prefill is None else "disaggregated"
    return CandidateScore(prefill, decode, path, sum(scored.parts), scored.parts)


def decision_of(ctx: Context, ranked: list[Scored], index: int = 0) -> Decision:
    """One of the ways of `rank`, as a decision."""
    chosen, candidates = ranked[index], tuple(map(_candidate, ranked))
    terms = candidates[index].terms
    return Decision(
        request_id=ctx.request.request_id,
        prefill=candidates[index].prefill,
        decode=candidates[index].decode,
        path=candidates[index].path,
        predicted_ttft_s=sum(terms[name] for name in TTFT_TERMS),
        cached_tokens_prefill=ctx.request.num_tokens - chosen.compute.uncached_tokens,
        cached_tokens_decode=ctx.request.num_tokens - chosen.decode.lacking_tokens if chosen.decode else 0,
        terms=terms,
        candidates=candidates,
    )


def _refusal(ctx: Context, role: str, live: Sequence[Option]) -> Refusal:
    """Why no worker of `role` is usable. Whoever could hold it, but is busy or excluded, makes it "full"."""
    if not live:
        reason: RefusalReason = "no_prefill_worker" if role == "prefill" else "no_decode_worker"
        return Refusal(reason, f"no {role} worker is up", MIN_RETRY_S)
    fitting = [o for o in live if _fits(ctx, o.load, needs_output=role == "decode")]
    if not fitting:
        request = ctx.request
        most = max(min(o.load.max_model_len, o.load.num_blocks * o.load.block_size) for o in live)
        asked = f"{request.num_tokens} tokens and up to {request.max_tokens} more"
        return Refusal("too_long", f"{asked} cannot fit on any {role} worker: the largest holds {most}", MAX_RETRY_S)
    wait = min(_decode_parts(ctx, option).wait for option in fitting)
    busy = f"all {len(live)} {role} workers are full or were tried"
    return Refusal("full", busy, min(max(wait, MIN_RETRY_S), MAX_RETRY_S))


assert len(TERM_NAMES) == 9, "_score fills the terms by position"
