"""The rows of `kvrelay verify` for latent KV (MLA): a tiny random model of that kind, made on the spot.

The pool has one part: a latent and its key's rotary part per token. It must travel from prefill to decode like keys and
values do, give Hugging Face's tokens, and every half of it must matter: negative controls change either one in flight.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrelay.cluster.verify.rows import Case, Expect, Report, tampering
from kvrelay.config import Settings
from kvrelay.decode.worker import DecodeWorker
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.models.spec_mla import LatentSpec
from kvrelay.errors import KvrelayError, LayoutMismatch
from kvrelay.hashing import block_hashes
from kvrelay.kvtransfer.plans.copy_plan import overlap
from kvrelay.plane.messages import Sampling, SequenceRequest
from kvrelay.settings.engine import EngineSettings, ModelSettings
from kvrelay.settings.router import RouterSettings
from kvrelay.settings.transfer import TransferSettings
from kvrelay.types import KvLayout

if TYPE_CHECKING:
    from kvrelay.cluster.launch.local import LocalCluster

FAMILY = "deepseek_v3"
BLOCK_SIZE, CHUNK, NUM_OUTPUT = 16, 64, 8
_LENGTHS = {"1 token": 1, "one block": BLOCK_SIZE, "block + 1": BLOCK_SIZE + 1, "several chunks": 2 * CHUNK + 5}
Change = Callable[[Any], None]  # of entries [tokens, width] float32, in place


async def add_latent_rows(
    report: Report, scratch: Path, transport: str, *, backend: str, expect: Expect, progress: Callable[[str], None]
) -> None:
    """Make the model below `scratch`, run its rows over `transport`. Raises KvrelayError when a worker cannot start."""
    from kvrelay.engine.checkpoints.tiny import tiny_checkpoint

    progress("a tiny model with latent attention")
    rows = _LatentRows(report, tiny_checkpoint(FAMILY, scratch / "tiny-latent"), transport, backend, expect)
    await rows.run()


class _LatentRows:
    """Runs the rows against one model folder."""

    def __init__(self, report: Report, folder: Path, transport: str, backend: str, expect: Expect) -> None:
        self._report, self._folder, self._transport, self._backend = report, folder, transport, backend
        self._prompts = [Case(name, [(37 * at + 11) % 250 + 3 for at in range(n)]) for name, n in _LENGTHS.items()]
        self._expected = expect(folder, self._prompts, NUM_OUTPUT)
        spec = ModelSpec.from_folder(folder)
        assert spec.latent is not None
        self._spec, self._latent = spec, spec.latent
        self._ids = 0

    async def run(self) -> None:
        from kvrelay.cluster.launch.local import local_cluster

        async with local_cluster(self._settings("full"), self._folder) as cluster:
            await self._checked_rows(cluster)
        async with local_cluster(self._settings("off"), self._folder) as cluster:
            await self._unchecked_rows(cluster)

    async def _checked_rows(self, cluster: "LocalCluster") -> None:
        await self._layout_row(cluster)
        await self._refused_row(cluster, "rotary parts", self._negate_rotary)

    async def _unchecked_rows(self, cluster: "LocalCluster") -> None:
        await self._changed_row(cluster, "rotary parts", self._negate_rotary)
        await self._changed_row(cluster, "latents", self._negate_latents)

    def _negate_rotary(self, entries: Any) -> None:
        entries[:, self._latent.kv_rank :].neg_()

    def _negate_latents(self, entries: Any) -> None:
        entries[:, : self._latent.kv_rank].neg_()

    def _settings(self, checks: str) -> Settings:
        return Settings(
            model=ModelSettings(source=str(self._folder), dtype="float32", max_model_len=4 * CHUNK),
            engine=EngineSettings.model_validate(
                {"backend": self._backend, "block_size": BLOCK_SIZE, "kv_memory": "4MiB", "token_budget": CHUNK,
                 "num_threads": 1, "prefix_caching": False}
            ),
            transfer=TransferSettings.model_validate({"transport": self._transport, "checks": checks}),
            router=RouterSettings(retry_budget=0, local_prefill_tokens=0),
        )  # fmt: skip

    async def _serve(self, cluster: "LocalCluster", prompt: Case) -> list[int]:
        """Prefilled on one worker, decoded on the other."""
        self._ids += 1
        request = SequenceRequest(
            request_id=f"latent-{self._ids}",
            token_ids=prompt.token_ids,
            num_prompt_tokens=len(prompt.token_ids),
            block_hashes=list(block_hashes(prompt.token_ids, BLOCK_SIZE)),
            tokens_per_hash=BLOCK_SIZE,
            sampling=Sampling(max_tokens=NUM_OUTPUT, temperature=0.0, ignore_eos=True),
        )
        return [token async for output in cluster.dispatcher.generate(request, force="remote") for token in output.token_ids]  # fmt: skip

    async def _layout_row(self, cluster: "LocalCluster") -> None:
        """The same tokens out of a pool of the form that is promised, whose blocks went over the wire whole and alone."""
        row = self._report.row(f"MLA layout ({self._transport})")
        target = _decode_worker(cluster).target
        before = target.stats().num_bytes
        for prompt, expected in zip(self._prompts, self._expected, strict=True):
            try:
                row.count(prompt.name, expected, await self._serve(cluster, prompt))
            except KvrelayError as error:
                row.claim(holds=False, note=f"{prompt.name}: {error}")
        layout, latent = target.memory.layout, self._latent
        form = f"{layout.head_dim} numbers a token and layer: latent {latent.kv_rank}, rotary {latent.rope_dim}"
        row.claim(holds=is_latent_layout(layout, self._spec, latent), note=form)
        blocks = sum(-(-len(prompt.token_ids) // BLOCK_SIZE) for prompt in self._prompts)
        moved, wanted = target.stats().num_bytes - before, blocks * layout.block_bytes
        row.claim(holds=moved == wanted, note=f"{moved} bytes moved for {blocks} blocks of {layout.block_bytes}")
        row.claim(holds=_is_refused(layout), note="a pool of keys and values of the same size takes latent blocks")

    async def _refused_row(self, cluster: "LocalCluster", what: str, change: Change) -> None:
        row = self._report.row(f"MLA: changed {what} refused")
        with changed_blocks(_decode_worker(cluster), change) as count:
            try:
                tokens = await self._serve(cluster, self._prompts[1])
            except KvrelayError as error:
                row.claim(holds=count() > 0 and "did not arrive as they left" in str(error), note=str(error))
            else:
                row.claim(holds=False, note=f"answered with {len(tokens)} tokens from corrupt blocks")

    async def _changed_row(self, cluster: "LocalCluster", what: str, change: Change) -> None:
        """The rows above can fail: what the checks would refuse does change the answer."""
        row = self._report.row(f"MLA: changed {what} with checks off change the answer")
        with changed_blocks(_decode_worker(cluster), change) as count:
            tokens = await self._serve(cluster, self._prompts[1])
        is_other = tokens != self._expected[1]
        row.claim(
            holds=count() > 0 and is_other,
            note="the answer changed" if is_other else "UNDETECTED: the answer is the same with corrupt blocks",
        )


def is_latent_layout(layout: KvLayout, spec: ModelSpec, latent: LatentSpec) -> bool:
    """Whether the pool holds one vector of latent and rotary part per token, and nothing besides."""
    entry_bytes = (latent.kv_rank + latent.rope_dim) * layout.itemsize
    return (
        (layout.is_latent, layout.num_parts, layout.num_kv_heads) == (True, 1, 1)
        and layout.num_layers == spec.num_layers
        and layout.region_bytes == layout.block_size * entry_bytes
    )


def _is_refused(layout: KvLayout) -> bool:
    """Whether such blocks may not go where keys and values are, though sizes in bytes are equal."""
    other = replace(layout, is_latent=False, block_size=layout.block_size // 2)
    try:
        overlap(layout, other)
    except LayoutMismatch as error:
        return error.field == "is_latent"
    return False


def _decode_worker(cluster: "LocalCluster") -> DecodeWorker:
    worker = cluster.inside[0]
    assert isinstance(worker, DecodeWorker)
    return worker


def changed_blocks(worker: DecodeWorker, change: Change) -> AbstractContextManager[Callable[[], int]]:
    """Change the entries of every region that this worker receives; yields a counter of regions."""
    import torch

    return tampering(worker.target, lambda region, layout: change(region.view(torch.float32).view(-1, layout.head_dim)))
