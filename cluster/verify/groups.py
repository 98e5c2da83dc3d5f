"""`kvrelay verify`'s rows about groups: n samples, best_of and beams over the hop, as one request.

The choices must be those of requests of their own with the same seeds, computed by one worker; the beams must be Hugging
Face's. Controls: other seeds give other choices, and one flipped bit in the prompt's only copy changes what follows.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvrelay.cluster.verify.rows import Verifier
from kvrelay.errors import KvrelayError
from kvrelay.plane.messages import Beams, Group, SequenceRequest
from kvrelay.serve.requests.choices import ranked

if TYPE_CHECKING:
    from kvrelay.cluster.launch.local import LocalCluster

SEEDS = (101, 102, 103, 104)
NUM_BEST = 2
WIDTH = 4
NAMES = ("block - 1", "one block", "block + 1", "several chunks", "Chinese", "code")  # of verify's cases
CONTROL = "one block"


def expected_beams(model_dir: Path, cases: Sequence[Any], num_output: int) -> list[list[list[int]]]:
    """What Hugging Face's beam search finds in float32, end-of-sequence ignored, best first."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for name in ("eos_token_id", "temperature", "top_p", "top_k"):
        setattr(model.generation_config, name, None)
    found: list[list[list[int]]] = []
    for case in cases:
        ids = torch.tensor([case.token_ids])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_output, do_sample=False, num_beams=WIDTH,
            num_return_sequences=WIDTH, pad_token_id=0,
        )  # fmt: skip
        found.append(out[:, len(case.token_ids) :].tolist())
    return found


class GroupRows:
    """Runs the rows with a prefill worker and a decode worker."""

    def __init__(self, verifier: Verifier, model_dir: Path, transport: str, num_output: int) -> None:
        self._verifier, self._model_dir, self._transport, self._num_output = verifier, model_dir, transport, num_output
        self._cases = [case for case in verifier.cases if case.name in NAMES]

    async def run(self) -> None:
        from kvrelay.cluster.launch.local import local_cluster

        verifier = self._verifier
        verifier.tell("groups")
        beams = await asyncio.to_thread(expected_beams, self._model_dir, self._cases, self._num_output)
        async with local_cluster(verifier.settings_over(self._transport, "full"), self._model_dir) as cluster:
            await self._sample_rows(cluster)
            await self._beam_row(cluster, beams)
            leaks = await cluster.pool_leaks()
            verifier.add_row("every block of a group given back").claim(
                holds=not leaks, note=leaks[0] if leaks else "free + cached = total"
            )
        async with local_cluster(verifier.settings_over(self._transport, "off"), self._model_dir) as cluster:
            await self._control_row(cluster, beams)

    def _request(self, case: Any, group: Group | None, seed: int = 0) -> SequenceRequest:
        request = self._verifier.request_of(case)
        sampling = msgspec.structs.replace(request.sampling, temperature=1.0, seed=seed, logprobs=0)
        if group is not None and group.beams is not None:
            sampling = request.sampling
        return msgspec.structs.replace(request, sampling=sampling, group=group)

    async def _run(self, cluster: "LocalCluster", request: SequenceRequest, force: Any) -> tuple[list[list[int]], Any]:
        """(tokens of each choice, their summed log-probabilities), from workers that have nothing cached."""
        for member in cluster.members:
            await cluster.dispatcher.reset_cache(member.worker_id)
        count = request.group.num_choices if request.group is not None else 1
        tokens: list[list[int]] = [[] for _ in range(count)]
        scores = [0.0] * count
        async for output in cluster.dispatcher.generate(request, force=force):
            tokens[output.choice] += output.token_ids
            scores[output.choice] += sum(entry.logprob for entry in output.logprobs)
        return tokens, scores

    async def _sample_rows(self, cluster: "LocalCluster") -> None:
        """n, best_of, and that the seeds matter."""
        rows = [
            self._verifier.add_row(name)
            for name in (
                f"n = {len(SEEDS)} over the hop = requests of their own",
                f"best_of {len(SEEDS)}, n = {NUM_BEST} over the hop",
                "other seeds give other choices",
            )
        ]
        for case in self._cases:
            try:
                alone = [await self._run(cluster, self._request(case, None, seed), "local") for seed in SEEDS]
                tokens, scores = await self._run(cluster, self._request(case, Group(seeds=SEEDS)), "remote")
                others, _ = await self._run(cluster, self._request(case, Group(seeds=(1, 2, 3, 4))), "remote")
            except KvrelayError as error:
                for row in rows:
                    row.claim(holds=False, note=f"{case.name}: {error}")
                continue
            own = [one[0][0] for one in alone]
            rows[0].count(case.name, _flat(own), _flat(tokens))
            best = ranked([one[1][0] for one in alone], len(SEEDS), NUM_BEST)
            got = ranked(scores, len(SEEDS), NUM_BEST)
            rows[1].count(case.name, _flat(own[index] for index in best), _flat(tokens[index] for index in got))
            rows[2].claim(
                holds=others != own, note="the oracle can fail" if others != own else f"{case.name}: the same"
            )

    def _beams(self, case: Any) -> SequenceRequest:
        return self._request(case, Group(beams=Beams(width=WIDTH, num_returned=WIDTH)))

    async def _beam_row(self, cluster: "LocalCluster", expected: list[list[list[int]]]) -> None:
        for force, name in (("local", "on one worker"), ("remote", "over the hop")):
            row = self._verifier.add_row(f"beam search, width {WIDTH}, {name} = Hugging Face")
            for case, beams in zip(self._cases, expected, strict=True):
                try:
                    tokens, _ = await self._run(cluster, self._beams(case), force)
                except KvrelayError as error:
                    row.claim(holds=False, note=f"{case.name}: {error}")
                else:
                    row.count(case.name, _flat(beams), _flat(tokens))

    async def _control_row(self, cluster: "LocalCluster", expected: list[list[list[int]]]) -> None:
        """With checks off, a bit of the one copy that all members share is every member's."""
        row = self._verifier.add_row("flipped bit with checks off changes choices and beams")
        index = next(i for i, case in enumerate(self._cases) if case.name == CONTROL)
        case = self._cases[index]
        right, _ = await self._run(cluster, self._request(case, Group(seeds=SEEDS)), "remote")
        with self._verifier.flipped(cluster) as flips:
            wrong, _ = await self._run(cluster, self._request(case, Group(seeds=SEEDS)), "remote")
        row.claim(holds=flips() > 0 and wrong != right, note="the choices changed" if wrong != right else "UNDETECTED")
        with self._verifier.flipped(cluster) as flips:
            beams, _ = await self._run(cluster, self._beams(case), "remote")
        changed = beams != expected[index]
        row.claim(holds=flips() > 0 and changed, note="the beams changed" if changed else "UNDETECTED: the same beams")


def _flat(choices: Any) -> list[int]:
    """Of several choices one list, each closed by a token that no vocabulary has."""
    return [token for tokens in choices for token in (*tokens, -1)]
