"""The rows of `kvrelay verify`: what is served how, and the negative controls. Each function returns setups as data."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from kvrelay.cluster.launch.local import LocalCluster
from kvrelay.cluster.verify import computing
from kvrelay.cluster.verify import steering as steer
from kvrelay.cluster.verify.prompts import BLOCK_SIZE, VerifyPrompt, repeating_prompts, shared_prompts, unlike_prompts
from kvrelay.cluster.verify.rows import Case, Must, OwnRows, Setup, VerifyRow, blocks_freed, during
from kvrelay.cluster.verify.verifier import Verifier
from kvrelay.decode.target import KvTarget
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.models.spec_parts import LatentSpec
from kvrelay.engine.scheduling.fair_share import CREDIT_TOKENS, TURNS_IN_CREDIT
from kvrelay.engine.scheduling.preempt import PreemptionMode
from kvrelay.engine.scheduling.scheduler import Scheduler
from kvrelay.engine.step.engine import Engine
from kvrelay.errors import LayoutMismatch
from kvrelay.hashing import tenant_of
from kvrelay.kvtransfer.mover.copy_plan import pair
from kvrelay.plane.messages import SequenceRequest
from kvrelay.types import KvLayout

FLIPPED_BIT = steer.in_flight(steer.flip_exponent_bit, most=1)
CONTROL = ("3 blocks",)  # the prompt that controls damage
PLACES = (("remote", "disaggregated"), ("local", "on one worker"))


# ---- paths: aggregated, disaggregated, cached, batched


@during
async def hits_cache(case: Case) -> AsyncIterator[None]:
    yield
    hits, count = sum(answer.cached_tokens > 0 for answer in case.answers), len(case.answers)
    case.result.check(f"{hits} of {count} prompts hit the cache", holds=hits > count // 2)


HITS_CACHE = hits_cache()


def paths(transports: Sequence[str]) -> list[Setup]:
    """Every transport, the first one also cached, batched, and in blocks of two sizes."""
    first, one, size, flipped = transports[0], ("one block",), 2 * BLOCK_SIZE, (FLIPPED_BIT,)
    own = (
        VerifyRow("prefix-cached on both workers", during=(HITS_CACHE,)),
        VerifyRow("batched with others", cold=True, together=True, force="local remote"),
    )
    setups = []
    for transport in transports:
        rows: list[VerifyRow | OwnRows] = [VerifyRow(f"disaggregated over {transport}", cold=True)]
        if transport == first:
            rows = [VerifyRow("aggregated (one worker)", force="local"), *rows, *own]
        refused = f"flipped bit refused ({transport})"
        rows.append(VerifyRow(refused, Must.FAIL_CHECKSUM, one, cold=True, during=flipped))
        rows.append(blocks_freed(f"every block freed ({transport})"))
        setups.append(Setup(f"prefill and decode over {transport}", tuple(rows), transport))
    unequal = VerifyRow(f"prefill in blocks of {size} tokens, decode in {BLOCK_SIZE}")
    unchecked = VerifyRow("flipped bit with checks off changes the answer", Must.CHANGE, one, during=flipped)
    return [
        *setups,
        Setup("unequal block sizes", (unequal,), first, overrides={"prefill": {"block_size": size}}),
        Setup("negative control with checks off", (unchecked,), first, checks="off"),
    ]


# ---- lower tiers: host memory, disk, the cluster's store


FROM_TIER = steer.counted("tier_hit_tokens", note="{} tokens were loaded from the tier")


async def _fill(
    verifier: Verifier,
    cluster: LocalCluster,
    forget: Callable[[Engine], object] | None = None,
    only: Sequence[str] | None = None,
) -> None:
    """Serve every prompt twice, since the disk stores a block that is offered again; then reset what is above it."""
    worker = cluster.inside[0]
    for _ in range(2):
        for prompt in verifier.prompts:
            if only is None or prompt.name in only:
                await verifier.serve(cluster, prompt, "local")
        await steer.tiers_idle(worker)
    if forget is not None:
        await worker.thread.call(forget)


def tiers(scratch: Path, kv_bytes: int) -> list[Setup]:
    """Prompts are served, offloaded, forgotten above the tier and served again, on one worker."""
    disk = {"disk_path": str(scratch / "disk"), "disk_size": 4 * kv_bytes}

    def setup(
        title: str, rows: tuple[VerifyRow, ...], cache: dict[str, Any], prepare: Any = _fill, checks: str = "full"
    ) -> Setup:
        cache = {"host_memory": kv_bytes, "prefetch": "wait", **cache}
        return Setup(title, rows, "auto", checks, {"cache": cache}, num_prefill=0, prepare=prepare)

    def row(name: str) -> VerifyRow:
        return VerifyRow(f"KV from {name}", force="local", during=(FROM_TIER,))

    def tier(name: str, cache: dict[str, Any], forget: Callable[[Engine], object]) -> list[Setup]:
        refused, believed = (
            VerifyRow(text, must, CONTROL, "local", during=(steer.corrupt_host_tier(is_checked=must is Must.EQUAL),))
            for text, must in (
                (f"changed bytes refused ({name})", Must.EQUAL),
                (f"changed bytes with checks off change the answer ({name})", Must.CHANGE),
            )
        )
        checked = setup(f"KV from {name}", (row(name), refused), cache, partial(_fill, forget=forget))
        unchecked = setup(f"KV from {name}, checks off", (believed,), cache, partial(_fill, only=CONTROL), "off")
        return [checked, unchecked]

    restarted = "disk, after a restart"
    return [
        *tier("host memory", {}, lambda engine: engine.pool.reset_cache()),
        *tier("disk", disk, lambda engine: engine.reset_cache()),
        setup(f"KV for {restarted}", (), disk),
        setup(f"KV from {restarted}", (row(restarted),), disk, prepare=None),
        *tier("the cluster's store", {"remote": "cluster"}, lambda engine: engine.reset_cache()),
    ]


# ---- preemption: swapped, recomputed, returned to prefill


def preemption(transport: str) -> list[Setup]:
    """Every sequence is preempted on the decode worker, whose cache is reset: only the mode can restore its KV."""

    def setup(mode: str, rows: tuple[VerifyRow | OwnRows, ...], checks: str = "full") -> Setup:
        engine = {"preemption": mode, "speculation": "off"}  # drafts could end an answer before it is preempted
        return Setup(f"preemption: {mode}", rows, transport, checks, {"engine": engine})

    damaged = steer.preempting(str(PreemptionMode.SWAP), steer.corrupt_swapped)
    found = steer.counted("swap_corrupt_blocks", note="{} blocks found corrupt, the sequence was recomputed")
    refused = VerifyRow("preempted: changed swapped bytes refused", Must.EQUAL, CONTROL, during=(found, damaged))
    name = "preempted: changed swapped bytes with checks off change the answer"
    believed = VerifyRow(name, Must.CHANGE, CONTROL, during=(damaged,))
    setups = []
    for mode in map(str, PreemptionMode):
        row = VerifyRow(f"preempted on the decode worker: {mode}", during=(steer.preempting(mode),))
        freed = blocks_freed(f"preempted: every block freed ({mode})")
        setups.append(setup(mode, (row, refused, freed) if mode == str(PreemptionMode.SWAP) else (row, freed)))
    return [*setups, setup(str(PreemptionMode.SWAP), (believed,), "off")]


# ---- queue order: priorities, deadlines, tenants

_DEADLINE_S = 300.0


RANKED_LOAD: dict[str, dict[str, Any]] = {
    "1 token": {"priority": 3},
    "block - 1": {},
    "one block": {},
    "block + 1": {},
    "Chinese": {"tenant": "modest"},
    "Russian": {"tenant": "hurried", "deadline_s": 2 * _DEADLINE_S},
    "Arabic": {"tenant": "hurried", "deadline_s": _DEADLINE_S},
    "several chunks": {"priority": -4},
}
"""In order of arrival, by prompt: what decides the requests' places in the queue."""
RANKED_ORDER = ("several chunks", "Arabic", "Russian", "Chinese", "block - 1", "one block", "block + 1", "1 token")
"""By priority; deadline; the tenant with the least service; arrival; the lowest priority last."""
ARRIVAL_ORDER = tuple(RANKED_LOAD)


def _ranked_request(where: str, verifier: Verifier, prompt: VerifyPrompt) -> SequenceRequest:
    rank = {"tenant": "greedy", **RANKED_LOAD[prompt.name]}
    tenant = tenant_of(f"{rank['tenant']} {where}")  # a tenant's counters last as long as the worker
    # a tenant that was served "several chunks" loses its turn; one that was served any other prompt keeps its deadlines
    num_tokens = len(verifier.prompt("several chunks").token_ids) + verifier.num_output
    weight = TURNS_IN_CREDIT * num_tokens / CREDIT_TOKENS
    return msgspec.structs.replace(verifier.request(prompt), **rank | {"tenant": tenant, "weight": weight})


def queue_order(verifier: Verifier, transport: str) -> list[Setup]:
    """A whole load queues at a worker that runs one sequence at a time. Control: without ranks, order of arrival."""
    rows: list[VerifyRow | OwnRows] = []
    for (force, where), stage in zip(PLACES, ("reserved", "first token"), strict=True):
        name = f"priorities, deadlines, tenants {where}"
        for order, suffix, request in (
            (RANKED_ORDER, "", partial(_ranked_request, where)),
            (ARRIVAL_ORDER, ": without them, arrival", lambda verifier, prompt: None),
        ):
            served = VerifyRow(name + suffix, Must.EQUAL, ARRIVAL_ORDER, force, cold=True, together=True)
            rows.append(replace(served, during=(steer.served_in_order(stage, order),), request=request))
    rows.append(blocks_freed("every block of queued requests freed"))
    overrides: dict[str, dict[str, Any]] = {"decode": {"max_running": 1}}
    prompts = tuple(map(verifier.prompt, ARRIVAL_ORDER))
    return [Setup("priorities, deadlines and tenants", tuple(rows), transport, overrides=overrides, prompts=prompts)]


# ---- mixed batches

SHORT = ("block - 1", "one block", "block + 1")  # these decode
LONG = "several chunks"  # while this prompt is computed


def mixed_batches(verifier: Verifier, transport: str) -> list[Setup]:
    """Steps that decode some sequences and compute another one's prompt, which is always the decode worker's own."""

    def only_long_queued(scheduler: Scheduler) -> bool:
        return len(scheduler.running) == len(SHORT) and len(scheduler.waiting) == 1

    ready = {"local": steer.all_queued(len(SHORT) + 1), "remote": only_long_queued}

    def row(name: str, place: str, must: Must, during: Any) -> VerifyRow:
        force = f"{place} " * len(SHORT) + "local"
        return VerifyRow(name, must, (*SHORT, LONG), force, cold=True, together=True, during=(during,))

    names = {"local": "on one worker", "remote": "transferred KV and a prompt of its own"}
    rows, controls = [], []
    for place, name in names.items():
        rows.append(row(f"mixed batches: {name}", place, Must.EQUAL, steer.mixed(ready[place])))
        changed = steer.corrupt_mixed(ready[place], LONG)
        name = f"changed KV in a mixed batch changes the answers ({name})"
        controls.append(row(name, place, Must.ANYTHING, changed))
    freed = blocks_freed("every block of mixed batches freed")
    return [Setup("mixed batches", (*rows, freed, *controls), transport)]


# ---- cascade attention


def cascade(verifier: Verifier, transport: str) -> list[Setup]:
    """Requests that decode side by side over one prefix, which is read once; controls with nothing in common."""
    shared = shared_prompts(verifier.prompts, verifier.longest_prompt)
    unlike = unlike_prompts(verifier.prompts, verifier.longest_prompt)
    one, other = tuple(prompt.name for prompt in shared), tuple(prompt.name for prompt in unlike)
    not_again = partial(steer.counted, "cascade_saved_tokens", note="{} tokens of KV not read again")
    nothing, wrong = (not_again(holds=lambda count: count == 0),), (not_again(), computing.sharing_unlike_kv())
    side_by_side = VerifyRow("cascade: nothing in common, nothing shared", prompts=other, together=True)
    once = replace(side_by_side, name="cascade: a shared prefix is read once", prompts=one, num_first=1)
    unlike_kv = replace(side_by_side, name="cascade: sharing unlike KV changes the answer", must=Must.CHANGE)
    rows = (
        replace(once, during=(steer.prefix_read_once(),)),
        replace(side_by_side, during=nothing),
        replace(unlike_kv, during=wrong, when=steer.has_native_cascade),
    )
    return [Setup("cascade attention", rows, transport, prompts=(*shared, *unlike))]


# ---- speculation

PARTLY_ACCEPTED = steer.counted(
    "accepted_tokens",
    "drafted_tokens",
    note="{} of {} drafted tokens were accepted",
    holds=lambda accepted, drafted: drafted > accepted > 0,
)


def speculation(verifier: Verifier, transport: str) -> list[Setup]:
    """Prompts that repeat themselves, drafted by n-grams and by a draft model (the model, its last token wrong)."""
    prompts = tuple(repeating_prompts(verifier.prompts, verifier.longest_prompt))
    by_model = {"speculation": "model", "draft_model": str(verifier.model_dir)}
    setups = []
    for kind, engine in (("speculation", {}), ("draft model", by_model)):
        drafting = (steer.always_drafting(), PARTLY_ACCEPTED)
        rows = [VerifyRow(f"{kind} {where}", force=one, together=True, during=drafting) for one, where in PLACES]
        name = f"{kind}: accepting every draft changes the answers"
        drafting = (steer.always_drafting(), steer.accepting_every_draft())
        rows.append(VerifyRow(name, Must.CHANGE, together=True, during=drafting))
        setups.append(Setup(kind, tuple(rows), transport, overrides={"engine": engine}, prompts=prompts))
    return setups


# ---- latent KV (MLA)


def latent(verifier: Verifier, transport: str) -> list[Setup]:
    """Latents and rotary parts travel as one vector per token, and both matter. The verifier's model must have them."""
    spec = ModelSpec.from_folder(verifier.model_dir)
    assert spec.latent is not None
    rank, width = spec.latent.kv_rank, spec.latent.kv_rank + spec.latent.rope_dim
    rotary, latents = (steer.in_flight(steer.negate_entries(*part)) for part in ((rank, width), (0, rank)))
    one = ("one block",)
    rows = (
        VerifyRow(f"MLA layout ({transport})", during=(latent_blocks_whole(spec, spec.latent),)),
        VerifyRow("MLA: changed rotary parts refused", Must.FAIL_CHECKSUM, one, during=(rotary,)),
    )
    controls = (
        VerifyRow("MLA: changed rotary parts with checks off change the answer", Must.CHANGE, one, during=(rotary,)),
        VerifyRow("MLA: changed latents with checks off change the answer", Must.CHANGE, one, during=(latents,)),
    )
    uncached = {"engine": {"prefix_caching": False}}
    return [
        Setup("latent attention", rows, transport, overrides=uncached),
        Setup("latent attention, checks off", controls, transport, "off", uncached),
    ]


@during
async def latent_blocks_whole(case: Case, spec: ModelSpec, latent: LatentSpec) -> AsyncIterator[None]:
    """The pool has latent layout, only whole blocks are transferred, and a pool of keys and values refuses them."""
    worker = case.cluster.inside[0]
    assert worker.ends is not None
    target = worker.ends.target.plane
    assert isinstance(target, KvTarget)
    layout = target.memory.layout
    before = target.stats().num_bytes
    yield
    moved = target.stats().num_bytes - before
    blocks = sum(-(-len(answer.prompt.token_ids) // layout.block_size) for answer in case.answers)
    form = f"{layout.head_dim} numbers a token and layer: latent {latent.kv_rank}, rotary {latent.rope_dim}"
    case.result.check(form, holds=is_latent_layout(layout, spec, latent))
    note = f"{moved} bytes transferred for {blocks} blocks of {layout.block_bytes}"
    case.result.check(note, holds=moved == blocks * layout.block_bytes)
    note = "a pool of keys and values of the same size accepts latent blocks"
    case.result.check(note, holds=_is_refused_by_keys_and_values(layout))


def is_latent_layout(layout: KvLayout, spec: ModelSpec, latent: LatentSpec) -> bool:
    """Whether the pool holds one vector of latent and rotary part per token, and nothing else."""
    entry_bytes = (latent.kv_rank + latent.rope_dim) * layout.itemsize
    return (
        (layout.is_latent, layout.num_parts, layout.num_kv_heads) == (True, 1, 1)
        and layout.num_layers == spec.num_layers
        and layout.region_bytes == layout.block_size * entry_bytes
    )


def _is_refused_by_keys_and_values(layout: KvLayout) -> bool:
    """Whether such blocks may not go to a pool of keys and values, though sizes in bytes are equal."""
    other = replace(layout, is_latent=False, block_size=layout.block_size // 2)
    try:
        pair(layout, other)
    except LayoutMismatch as error:
        return error.subject == "is_latent"
    return False
