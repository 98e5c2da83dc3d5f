"""Rows about n, best_of and beam search, each served as one request whose prompt is transferred once.

The choices must be those of single requests with the same seeds on one worker; the beams must be Hugging Face's.
Controls: other seeds give other choices, and a flipped bit in the prompt's only copy changes choices and beams.
"""

import asyncio
from collections.abc import Iterable
from contextlib import AsyncExitStack

import msgspec

from kvrelay.cluster.launch.local import LocalCluster
from kvrelay.cluster.verify.hugging_face import expected_beams
from kvrelay.cluster.verify.prompts import VerifyPrompt
from kvrelay.cluster.verify.rows import Evidence
from kvrelay.cluster.verify.suites import FLIPPED_BIT
from kvrelay.cluster.verify.verifier import ServedAnswer, Verifier, reset_caches
from kvrelay.errors import KvrelayError
from kvrelay.plane.messages import Beams, Group
from kvrelay.serve.api.parameters import ranked

SEEDS, OTHER_SEEDS = (101, 102, 103, 104), (1, 2, 3, 4)
NUM_BEST = 2
WIDTH = 4
NAMES = ("block - 1", "one block", "block + 1", "several chunks", "Chinese", "code")
CONTROL = "one block"


async def run_groups(verifier: Verifier, transport: str) -> None:
    """Add the rows to the report."""
    verifier.progress("groups")
    prompts = [prompt for prompt in verifier.prompts if prompt.name in NAMES]
    found = await asyncio.to_thread(expected_beams, verifier.model_dir, prompts, verifier.num_output, width=WIDTH)
    beams = {prompt.name: one for prompt, one in zip(prompts, found, strict=True)}
    async with verifier.cluster(transport) as cluster:
        await _sample_rows(verifier, cluster, prompts)
        for force, where in (("local", "on one worker"), ("remote", "disaggregated")):
            row = verifier.report.row(f"beam search, width {WIDTH}, {where} = Hugging Face")
            for prompt in prompts:
                try:
                    answer = await _serve_beams(verifier, cluster, prompt, force)
                    row.compare(prompt.name, _flat(beams[prompt.name]), _flat(answer.choices))
                except KvrelayError as error:
                    row.check(f"{prompt.name}: {error}", holds=False)
        leaks = await cluster.pool_leaks()
        row = verifier.report.row("every block of a group freed")
        row.check(leaks[0] if leaks else "free + cached = total", holds=not leaks)
    async with verifier.cluster(transport, "off") as cluster:
        await _control_row(verifier, cluster, beams[CONTROL])


async def _sample_rows(verifier: Verifier, cluster: LocalCluster, prompts: Iterable[VerifyPrompt]) -> None:
    count = len(SEEDS)
    names = (
        f"n = {count} disaggregated = single requests",
        f"best_of {count}, n = {NUM_BEST} disaggregated",
        "other seeds give other choices",
    )
    samples, best_of, other_seeds = rows = [verifier.report.row(name) for name in names]
    for prompt in prompts:
        try:
            alone = [await _serve_one(verifier, cluster, prompt, seed) for seed in SEEDS]
            group = await _serve_samples(verifier, cluster, prompt, SEEDS)
            others = await _serve_samples(verifier, cluster, prompt, OTHER_SEEDS)
        except KvrelayError as error:
            for row in rows:
                row.check(f"{prompt.name}: {error}", holds=False)
            continue
        own = [answer.tokens for answer in alone]
        samples.compare(prompt.name, _flat(own), _flat(group.choices))
        best = ranked([answer.scores[0] for answer in alone], count, NUM_BEST)
        chosen = ranked(group.scores, count, NUM_BEST)
        best_of.compare(prompt.name, _flat(own[i] for i in best), _flat(group.choices[i] for i in chosen))
        same = others.choices == own
        other_seeds.check(f"{prompt.name}: the same" if same else "the comparison can fail", holds=not same)


async def _control_row(verifier: Verifier, cluster: LocalCluster, beams: list[list[int]]) -> None:
    """With checks off, a bit of the one copy that all members share changes every member."""
    row = verifier.report.row("flipped bit with checks off changes choices and beams")
    prompt = verifier.prompt(CONTROL)
    right = await _serve_samples(verifier, cluster, prompt, SEEDS)
    evidence = Evidence()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(FLIPPED_BIT(cluster, evidence))
        wrong = await _serve_samples(verifier, cluster, prompt, SEEDS)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(FLIPPED_BIT(cluster, evidence))
        answer = await _serve_beams(verifier, cluster, prompt, "remote")
    for what, changed in (("choices", wrong.choices != right.choices), ("beams", answer.choices != beams)):
        row.check(f"the {what} changed" if changed else f"UNDETECTED: the same {what}", holds=changed)
    for finding in evidence.findings:
        holds, note = finding(())
        row.check(note, holds=holds)


async def _serve_one(verifier: Verifier, cluster: LocalCluster, prompt: VerifyPrompt, seed: int) -> ServedAnswer:
    return await _serve(verifier, cluster, prompt, "local", None, seed)


async def _serve_samples(
    verifier: Verifier, cluster: LocalCluster, prompt: VerifyPrompt, seeds: tuple[int, ...]
) -> ServedAnswer:
    return await _serve(verifier, cluster, prompt, "remote", Group(seeds=seeds))


async def _serve_beams(verifier: Verifier, cluster: LocalCluster, prompt: VerifyPrompt, force: str) -> ServedAnswer:
    return await _serve(verifier, cluster, prompt, force, Group(beams=Beams(width=WIDTH, num_returned=WIDTH)))


async def _serve(
    verifier: Verifier, cluster: LocalCluster, prompt: VerifyPrompt, force: str, group: Group | None, seed: int = 0
) -> ServedAnswer:
    """From workers that have nothing cached. Raises KvrelayError."""
    await reset_caches(cluster)
    is_sampled = group is None or group.beams is None
    request = (
        verifier.request(prompt, temperature=1.0, seed=seed, logprobs=0) if is_sampled else verifier.request(prompt)
    )
    answer = await verifier.serve(cluster, prompt, force, msgspec.structs.replace(request, group=group))
    if answer.error is not None:
        raise answer.error
    return answer


def _flat(choices: Iterable[list[int]]) -> list[int]:
    """One list of several choices, each closed by -1, which no vocabulary has."""
    return [token for tokens in choices for token in (*tokens, -1)]
