"""`kvrelay verify`'s rows about quantised weights: greedy tokens that float32 weights would nearly have chosen, and always
the same ones.

int4 weights are other weights: tokens differ from float32's wherever two are close, and are compared as those over fp8
KV are (verify_kv.py). A prefill worker with weights of its own kind is no partner: that KV is refused is a matter of
fingerprints, and shown without processes (tests/engine/models/test_quantized.py).
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvrelay.cluster.verify.fp8_kv import Answer, gaps
from kvrelay.cluster.verify.rows import Verifier
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.errors import KvrelayError

if TYPE_CHECKING:
    from kvrelay.cluster.launch.local import LocalCluster

TOLERANCES = {"int8": 0.05, "int4": 0.4}  # standard deviations of the logits
OF_RANDOM_WEIGHTS = 3.0  # times that: logits of noise are flatter; a token taken by chance is 2.5 deviations away


class QuantizedRows:
    """Runs the rows with a prefill and a decode worker whose weights are quantised alike."""

    def __init__(self, verifier: Verifier, model_dir: Path, transport: str, *, is_random: bool = False) -> None:
        self._verifier, self._model_dir, self._transport = verifier, model_dir, transport
        self._slack = OF_RANDOM_WEIGHTS if is_random else 1.0

    async def run(self) -> None:
        from kvrelay.cluster.launch.local import local_cluster

        for name in TOLERANCES:
            self._verifier.tell(f"{name} weights")
            plain = self._verifier.settings_over(self._transport, "full")
            settings = plain.model_copy(update={"model": plain.model.model_copy(update={"quantization": name})})
            async with local_cluster(settings, self._model_dir) as cluster:
                answers = await self._same_row(cluster, name)
            await self._tolerance_row(answers, name)

    async def _same_row(self, cluster: "LocalCluster", name: str) -> list[Answer]:
        """The tokens are the same however they are served; what they are."""
        row = self._verifier.add_row(f"{name} weights: aggregated = disaggregated = cached")
        answers: list[Answer] = []
        for case in self._verifier.cases:
            try:
                await _forget(cluster)
                expected, _ = await self._verifier.tokens_of(cluster, case, "local")
                answers.append(Answer(case.token_ids, expected))
                await _forget(cluster)
                for _ in range(2):  # the second time cached
                    row.count(case.name, expected, (await self._verifier.tokens_of(cluster, case, "remote"))[0])
            except KvrelayError as error:
                row.claim(holds=False, note=f"{case.name}: {error}")
        return answers

    async def _tolerance_row(self, answers: Sequence[Answer], name: str) -> None:
        most = TOLERANCES[name] * self._slack
        row = self._verifier.add_row(f"{name} weights: within {most:g} deviations of float32's choice")
        found = await asyncio.to_thread(gaps, self._model_dir, answers)
        mean, worst = sum(found) / max(len(found), 1), max(found, default=float("inf"))
        note = f"mean {mean:.3f}, worst {worst:.3f}; {found.count(0.0)} of {len(found)} as float32"
        if ModelSpec.from_folder(self._model_dir).experts is not None:
            # other weights may choose a token another expert: a jump, however small the rounding
            found, note = (
                sorted(found)[: -(-len(found) // 2)],
                f"the better half, since experts are chosen anew; {note}",
            )
        for gap in found:
            row.claim(holds=gap <= most, note=note)


async def _forget(cluster: "LocalCluster") -> None:
    for member in cluster.members:
        await cluster.dispatcher.reset_cache(member.worker_id)
