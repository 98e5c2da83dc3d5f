"""Rows about n, best_of and beam search, each served as one request whose prompt is transferred once.

The choices must be those of single requests with the same seeds on one worker; the beams must be Hugging Face's.
Controls: other seeds give other choices, and a flipped bit in the prompt's only copy changes choices and beams.
"""

import asyncio
from collections.abc import Iterable
from functools import partial

import msgspec

from kvrelay.cluster.launch.local import LocalCluster
from kvrelay.cluster.verify.prompts import VerifyPrompt, expected_beams
from kvrelay.cluster.verify.rows import Case, OwnRows, Setup, blocks_freed
from kvrelay.cluster.verify.suites import FLIPPED_BIT
from kvrelay.cluster.verify.verifier import RowResult, ServedAnswer, Verifier, reset_caches
from kvrelay.plane.messages import Beams, Group
from kvrelay.serve.api.parameters import ranked

SEEDS, OTHER_SEEDS = (101, 102, 103, 104), (1, 2, 3, 4)
NUM_BEST = 2
WIDTH = 4
NAMES = ("block - 1", "one block", "block + 1", "several chunks", "Chinese", "code")
CONTROL = "one block"
BEAMS = Group(beams=Beams(width=WIDTH, num_returned=WIDTH))


def groups(transport: str) -> list[Setup]:
    """One cluster for samples and beams, and one with checks off for the control."""
    beams: dict[str, list[list[int]]] = {}  # Hugging Face's, by prompt; filled before the first row
    count = len(SEEDS)
    samples = (
        f"n = {count} disaggregated = single requests",
        f"best_of {count}, n = {NUM_BEST} disaggregated",
        "other seeds give other choices",
    )
    rows = [OwnRows(samples, _serve_samples)]
    for force, where in (("local", "on one worker"), ("remote", "disaggregated")):
        name = f"beam search, width {WIDTH}, {where} = Hugging Face"
        rows.append(OwnRows((name,), partial(_serve_beams, beams, force)))
    rows.append(blocks_freed("every block of a group freed"))
    control = OwnRows(("flipped bit with checks off changes choices and beams",), partial(_serve_control, beams))
    return [
        Setup("groups", tuple(rows), transport, prepare=partial(_learn, beams)),
        Setup("groups, checks off", (control,), transport, "off"),
    ]


def _prompts(verifier: Verifier) -> list[VerifyPrompt]:
    return [prompt for prompt in verifier.prompts if prompt.name in NAMES]


async def _learn(beams: dict[str, list[list[int]]], verifier: Verifier, cluster: LocalCluster) -> None:
    prompts, count = _prompts(verifier), verifier.num_output
    found = await asyncio.to_thread(expected_beams, verifier.model_dir, prompts, count, width=WIDTH)
    beams.update((prompt.name, one) for prompt, one in zip(prompts, found, strict=True))


async def _serve_samples(
    verifier: Verifier, cluster: LocalCluster, samples: RowResult, best_of: RowResult, other_seeds: RowResult
) -> None:
    count = len(SEEDS)
    for prompt in _prompts(verifier):
        alone = [await _serve(verifier, cluster, prompt, "local", None, seed) for seed in SEEDS]
        group = await _serve(verifier, cluster, prompt, "remote", Group(seeds=SEEDS))
        others = await _serve(verifier, cluster, prompt, "remote", Group(seeds=OTHER_SEEDS))
        own = [answer.tokens for answer in alone]
        samples.compare(prompt.name, _flat(own), _flat(group.choices))
        best = ranked([answer.scores[0] for answer in alone], count, NUM_BEST)
        chosen = ranked(group.scores, count, NUM_BEST)
        best_of.compare(prompt.name, _flat(own[i] for i in best), _flat(group.choices[i] for i in chosen))
        same = others.choices == own
        other_seeds.check(f"{prompt.name}: the same" if same else "the comparison can fail", holds=not same)


async def _serve_beams(
    beams: dict[str, list[list[int]]], force: str, verifier: Verifier, cluster: LocalCluster, row: RowResult
) -> None:
    for prompt in _prompts(verifier):
        answer = await _serve(verifier, cluster, prompt, force, BEAMS)
        row.compare(prompt.name, _flat(beams[prompt.name]), _flat(answer.choices))


async def _serve_control(
    beams: dict[str, list[list[int]]], verifier: Verifier, cluster: LocalCluster, row: RowResult
) -> None:
    """With checks off, a bit of the one copy that all members share changes every member."""
    prompt, sampled = verifier.prompt(CONTROL), Group(seeds=SEEDS)
    right = {"choices": (await _serve(verifier, cluster, prompt, "remote", sampled)).choices, "beams": beams[CONTROL]}
    for what, group in (("choices", sampled), ("beams", BEAMS)):
        async with FLIPPED_BIT(Case(verifier, cluster, row)):
            wrong = await _serve(verifier, cluster, prompt, "remote", group)
        changed = wrong.choices != right[what]
        row.check(f"the {what} changed" if changed else f"UNDETECTED: the same {what}", holds=changed)


async def _serve(
    verifier: Verifier, cluster: LocalCluster, prompt: VerifyPrompt, force: str, group: Group | None, seed: int = 0
) -> ServedAnswer:
    """From workers that have nothing cached. Raises KvrelayError."""
    await reset_caches(cluster)
    is_sampled = group is None or group.beams is None
    sampling = {"temperature": 1.0, "seed": seed, "logprobs": 0} if is_sampled else {}
    request = msgspec.structs.replace(verifier.request(prompt, **sampling), group=group)
    return (await verifier.serve(cluster, prompt, force, request)).checked()


def _flat(choices: Iterable[list[int]]) -> list[int]:
    """One list of several choices, each closed by -1, which no vocabulary has."""
    return [token for tokens in choices for token in (*tokens, -1)]
