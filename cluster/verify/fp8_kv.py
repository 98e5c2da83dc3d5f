"""`kvrelay verify`'s rows about fp8 KV: greedy tokens that float32 KV would nearly have chosen, and always the same ones.

fp8 keeps 4 significant bits, so that tokens differ from float32's wherever two are close. Hence what is compared: by
how much a token's logit, by Hugging Face in float32 after the same tokens, is below the best one's; averaged over an
answer's tokens, in standard deviations of the logits. Random tokens are about 3 below. Controls: with wrong scales, or
one bit of one scale's exponent flipped, the same prompt must be further off than the tolerance.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrelay.cluster.verify.rows import Verifier, tampering
from kvrelay.errors import KvrelayError
from kvrelay.types import KvLayout

if TYPE_CHECKING:
    import torch

    from kvrelay.cluster.launch.local import LocalCluster
    from kvrelay.decode.target import KvTarget

TOLERANCE = 0.4  # standard deviations of the logits; seen: at most 0.25 on tiny families, 0.01 on SmolLM2
CONTROL = "one block"  # the case that the controls spoil: no window hides its first token
Damage = Callable[["torch.Tensor"], None]  # to a region's scales' bytes, [vectors, 4], in place


@dataclass(frozen=True, slots=True)
class Answer:
    """What greedy decoding said after a prompt."""

    prompt: list[int]
    token_ids: list[int]


def gaps(model_dir: Path, answers: Sequence[Answer]) -> list[float]:
    """For each answer: how far its tokens' logits are below the best, by Hugging Face in float32; see the module's text."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    found: list[float] = []
    for answer in answers:
        ids, chosen = torch.tensor([answer.prompt + answer.token_ids]), torch.tensor(answer.token_ids)
        with torch.inference_mode():
            logits = model(ids).logits[0, len(answer.prompt) - 1 : -1].float()
        below = logits.amax(1) - logits.gather(1, chosen[:, None])[:, 0]
        found.append(float((below / logits.std(1)).mean()))
    return found


class Fp8Rows:
    """Runs the rows with a prefill worker and a decode worker whose pools hold fp8."""

    def __init__(self, verifier: Verifier, model_dir: Path, transport: str) -> None:
        self._verifier, self._model_dir, self._transport = verifier, model_dir, transport

    async def run(self) -> None:
        self._verifier.tell("fp8 KV")
        async with self._cluster("full") as cluster:
            answers = await self._same_row(cluster)
            await self._refused_row(cluster)
        await self._tolerance_row(answers)
        async with self._cluster("off") as cluster:
            await self._control_row(cluster, "wrong scales leave the tolerance", _wrong_scales())
            await self._control_row(cluster, "a flipped exponent bit leaves the tolerance", _flip_exponent())

    @asynccontextmanager
    async def _cluster(self, checks: str) -> AsyncIterator["LocalCluster"]:
        from kvrelay.cluster.launch.local import local_cluster

        async with local_cluster(
            self._verifier.settings_over(self._transport, checks, kv_dtype="fp8_e4m3"), self._model_dir
        ) as cluster:
            yield cluster

    async def _tokens(self, cluster: "LocalCluster", case: Any, force: str, *, cold: bool = True) -> list[int]:
        """What greedy decoding answers. Raises KvrelayError."""
        if cold:
            for member in cluster.members:
                await cluster.dispatcher.reset_cache(member.worker_id)
        return (await self._verifier.tokens_of(cluster, case, force))[0]

    async def _same_row(self, cluster: "LocalCluster") -> list[Answer]:
        """Over fp8, too, the tokens are the same however they are served; what they are."""
        row = self._verifier.add_row("fp8 KV: aggregated = disaggregated = cached")
        answers: list[Answer] = []
        for case in self._verifier.cases:
            try:
                expected = await self._tokens(cluster, case, "local")
                answers.append(Answer(case.token_ids, expected))
                for cold in (True, False):
                    row.count(case.name, expected, await self._tokens(cluster, case, "remote", cold=cold))
            except KvrelayError as error:
                row.claim(holds=False, note=f"{case.name}: {error}")
        return answers

    async def _tolerance_row(self, answers: Sequence[Answer]) -> None:
        row = self._verifier.add_row(f"fp8 KV: within {TOLERANCE} deviations of float32's choice")
        found = await asyncio.to_thread(gaps, self._model_dir, answers)
        mean, worst = sum(found) / max(len(found), 1), max(found, default=math.inf)
        note = f"mean {mean:.3f}, worst {worst:.3f}; {found.count(0.0)} of {len(found)} as float32"
        for gap in found:
            row.claim(holds=gap <= TOLERANCE, note=note)

    async def _refused_row(self, cluster: "LocalCluster") -> None:
        """Scales are inside of what is checksummed."""
        row = self._verifier.add_row("fp8 KV: flipped bit of a scale refused")
        with damaged(_target(cluster), _flip_exponent()) as count:
            try:
                tokens = await self._tokens(cluster, self._control(), "remote")
            except KvrelayError as error:
                row.claim(holds=count() > 0 and "did not arrive as they left" in str(error), note=str(error))
            else:
                row.claim(holds=False, note=f"answered with {len(tokens)} tokens from a corrupt block")

    async def _control_row(self, cluster: "LocalCluster", what: str, damage: Damage) -> None:
        """The tolerance can be missed: with checks off, damage in flight shows."""
        row, case = self._verifier.add_row(f"fp8 KV, checks off: {what}"), self._control()
        with damaged(_target(cluster), damage) as count:
            tokens = await self._tokens(cluster, case, "remote")
        (gap,) = await asyncio.to_thread(gaps, self._model_dir, [Answer(case.token_ids, tokens)])
        row.claim(holds=count() > 0 and gap > TOLERANCE, note=f"{gap:.2f} deviations off")

    def _control(self) -> Any:
        return next(case for case in self._verifier.cases if case.name == CONTROL)


def _target(cluster: "LocalCluster") -> "KvTarget":
    from kvrelay.decode.worker import DecodeWorker

    worker = cluster.inside[0]
    assert isinstance(worker, DecodeWorker)
    return worker.target


def _wrong_scales() -> Damage:
    """Every scale times 8."""
    import torch

    def damage(scales: "torch.Tensor") -> None:
        scales.copy_((scales.clone().view(torch.float32) * 8).view(torch.uint8))

    return damage


def _flip_exponent() -> Damage:
    """The top bit of one scale's exponent: of the first value's, which stands after the keys."""
    done = False

    def damage(scales: "torch.Tensor") -> None:
        nonlocal done
        if not done:
            scales[len(scales) // 2, 3].bitwise_xor_(0x40)
        done = True

    return damage


def damaged(target: "KvTarget", damage: Damage) -> AbstractContextManager[Callable[[], int]]:
    """Damage the scales of every region that `target` receives; yields a counter of regions."""
    return tampering(target, lambda region, layout: damage(_scales(region, layout)))


def _scales(region: "torch.Tensor", layout: KvLayout) -> "torch.Tensor":
    """[vectors, 4] bytes, a view."""
    return region.view(-1, layout.row_bytes)[:, layout.head_dim * layout.itemsize :]
