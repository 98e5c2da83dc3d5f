"""Evidence that latent KV (MLA) is kept and transferred as one vector of latent and rotary part per token."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from kvrelay.cluster.launch.local import LocalCluster
from kvrelay.cluster.verify.damage import decode_worker
from kvrelay.cluster.verify.rows import During, Evidence
from kvrelay.cluster.verify.verifier import ServedAnswer
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.models.spec_mla import LatentSpec
from kvrelay.errors import LayoutMismatch
from kvrelay.kvtransfer.plans.copy_plan import overlap
from kvrelay.types import KvLayout


def latent_blocks_whole(spec: ModelSpec, latent: LatentSpec) -> During:
    """The pool has latent layout, only whole blocks are transferred, and a pool of keys and values refuses them."""

    @asynccontextmanager
    async def during(cluster: LocalCluster, evidence: Evidence) -> AsyncIterator[None]:
        target = decode_worker(cluster).target
        before = target.stats().num_bytes
        yield
        layout, moved = target.memory.layout, target.stats().num_bytes - before

        def whole_blocks(answers: Sequence[ServedAnswer]) -> tuple[bool, str]:
            blocks = sum(-(-len(answer.prompt.token_ids) // layout.block_size) for answer in answers)
            note = f"{moved} bytes transferred for {blocks} blocks of {layout.block_bytes}"
            return moved == blocks * layout.block_bytes, note

        form = f"{layout.head_dim} numbers a token and layer: latent {latent.kv_rank}, rotary {latent.rope_dim}"
        evidence.require(form, holds=is_latent_layout(layout, spec, latent))
        evidence.findings.append(whole_blocks)
        note = "a pool of keys and values of the same size accepts latent blocks"
        evidence.require(note, holds=_is_refused_by_keys_and_values(layout))

    return during


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
        overlap(layout, other)
    except LayoutMismatch as error:
        return error.field == "is_latent"
    return False
