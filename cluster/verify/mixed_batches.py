"""`kvrelay verify`'s rows about mixed batches: steps of a worker that decode some sequences and compute another's prompt.

On one worker, and on a decode worker whose sequences came over the hop while it computes a prompt of its own. The plans of
the worker's scheduler show that such steps there were. Control: changed KV in such a batch changes the answer.
"""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from kvrelay.cluster.verify.held_back import Ready, held_back, in_line
from kvrelay.cluster.verify.rows import Verifier
from kvrelay.engine.scheduling.scheduler import Scheduled, StepPlan
from kvrelay.engine.step.engine import Engine
from kvrelay.errors import KvrelayError

if TYPE_CHECKING:
    from kvrelay.cluster.launch.local import LocalCluster

SHORT = ("block - 1", "one block", "block + 1")  # of verify's cases: these decode
LONG = "several chunks"  # while this one is computed
_TIMEOUT_S = 300.0


def is_mixed(plan: StepPlan) -> bool:
    """Whether the step decodes a sequence and computes several tokens of another's prompt."""
    return any(map(_is_decode, plan.work)) and any(map(_is_chunk, plan.work))


def _is_decode(item: Scheduled) -> bool:
    return item.seq.num_output > 0 and item.num_tokens == 1


def _is_chunk(item: Scheduled) -> bool:
    return item.num_tokens > 1 and item.start < item.seq.request.num_prompt_tokens


class MixedRows:
    """Runs the rows with a decode worker in this process, whose plans it can see."""

    def __init__(self, verifier: Verifier, model_dir: Path, transport: str) -> None:
        self._verifier, self._model_dir, self._transport = verifier, model_dir, transport
        self._cases = [(index, case) for index, case in enumerate(verifier.cases) if case.name in (*SHORT, LONG)]

    async def run(self) -> None:
        from kvrelay.cluster.launch.local import local_cluster

        self._verifier.tell("mixed batches")
        settings = self._verifier.settings_over(self._transport, "full")
        async with local_cluster(settings, self._model_dir) as cluster:
            await self._row(cluster, "mixed batches on one worker", "local")
            await self._row(cluster, "mixed batches: KV over the hop, a prompt of its own", "remote")
            leaks = await cluster.pool_leaks()
            self._verifier.add_row("every block of mixed batches given back").claim(
                holds=not leaks, note=leaks[0] if leaks else "free + cached = total"
            )
            for force in ("local", "remote"):
                await self._control_row(cluster, force)

    async def _row(self, cluster: "LocalCluster", name: str, force: str) -> None:
        row = self._verifier.add_row(name)
        try:
            tokens, plans = await self._serve(cluster, force)
        except (KvrelayError, TimeoutError) as error:
            row.claim(holds=False, note=f"{type(error).__name__}: {error}")
            return
        for (index, case), got in zip(self._cases, tokens, strict=True):
            row.count(case.name, self._verifier.expected(index), got)
        num_mixed = sum(map(is_mixed, plans))
        row.claim(
            holds=num_mixed > 0, note=f"{num_mixed} of {len(plans)} steps decoded and computed a part of a prompt"
        )

    async def _control_row(self, cluster: "LocalCluster", force: str) -> None:
        """The oracle itself can fail: for those that decode, and for the one whose prompt is computed."""
        where = "on one worker" if force == "local" else "over the hop"
        row = self._verifier.add_row(f"changed KV in a mixed batch changes the answers ({where})")
        rot = _Rot()
        tokens, _ = await self._serve(cluster, force, rot)
        for (index, case), got in zip(self._cases, tokens, strict=True):
            if case.name in rot.changed:
                changed = got != self._verifier.expected(index)
                row.claim(holds=changed, note="they changed" if changed else f"UNDETECTED: {case.name} is the same")
        row.claim(holds=LONG in rot.changed and len(rot.changed) > 1, note=f"changed: {', '.join(sorted(rot.changed))}")

    async def _serve(
        self, cluster: "LocalCluster", force: str, rot: "_Rot | None" = None
    ) -> tuple[list[list[int]], list[StepPlan]]:
        """Everybody's tokens, all in one batch; `force`: where the short prompts are computed. The long one: on D."""
        for member in cluster.members:
            await cluster.dispatcher.reset_cache(member.worker_id)
        if rot is not None:
            rot.names = {len(case.token_ids): case.name for _, case in self._cases}
        ready: Ready = in_line(len(self._cases))
        if force == "remote":
            num_short = len(self._cases) - 1
            ready = lambda scheduler: len(scheduler.running) == num_short and len(scheduler.waiting) == 1  # noqa: E731
        async with asyncio.timeout(_TIMEOUT_S):
            with held_back(cluster.inside[0], ready, damage=rot) as plans:
                results = await asyncio.gather(
                    *(
                        self._verifier.tokens_of(cluster, case, "local" if case.name == LONG else force)
                        for _, case in self._cases
                    )
                )
        return [tokens for tokens, _ in results], plans


class _Rot:
    """In the first mixed step in which both have a block: other KV in the first one of one that decodes, and of the long prompt."""

    def __init__(self) -> None:
        self.changed: set[str] = set()
        self.names: dict[int, str] = {}  # of the cases, by the length of their prompts

    def __call__(self, engine: Engine, plan: StepPlan) -> None:
        if self.changed or not is_mixed(plan):
            return
        begun = [item for item in plan.work if _is_chunk(item) and item.start >= engine.config.block_size]
        if not begun:
            return
        for item in (next(filter(_is_decode, plan.work)), begun[0]):
            _distort(engine, item.seq.blocks[0])
            self.changed.add(self.names[item.seq.request.num_prompt_tokens])


def _distort(engine: Engine, block: int) -> None:
    """Every key and value of a block is another one."""
    import torch

    with torch.inference_mode():
        engine.storage.tensor[:, block].mul_(-4.0)
