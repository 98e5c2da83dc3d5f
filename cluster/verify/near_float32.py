"""Rows about fp8 KV and quantised weights: tokens that float32 would nearly have chosen, and the same on every path.

Such numbers differ from float32, so tokens differ wherever two are close. Compared is therefore how far a token's logit
is below the best one's by Hugging Face in float32 (`logit_gaps`). Controls of fp8 KV: with wrong scales, or one bit of
one scale's exponent flipped, the same prompt must be further off than the tolerance. That a prefill worker with weights
of another kind is refused is a matter of fingerprints (tests/engine/models/test_quantized.py).
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvrelay.cluster.launch.local import LocalCluster
from kvrelay.cluster.verify.damage import Change, flip_scale_exponent, in_flight, scale_fp8_scales
from kvrelay.cluster.verify.hugging_face import logit_gaps
from kvrelay.cluster.verify.rows import Must, VerifyRow, run_row
from kvrelay.cluster.verify.verifier import Overrides, ServedAnswer, Verifier, reset_caches
from kvrelay.engine.models.spec import ModelSpec

CONTROL = "one block"  # no window hides its first token
FLIPPED_SCALE = in_flight(flip_scale_exponent, most=1)


@dataclass(frozen=True, slots=True)
class NearVariant:
    """A way of computing that is nearly float32.

    tolerance: mean gap of an answer, standard deviations of the logits.
    """

    name: str
    overrides: Overrides
    tolerance: float
    controls: tuple[tuple[str, Change, int | None], ...] = ()  # what is damaged, how, in how many regions at most
    chooses_experts_anew: bool = False


FP8_KV = NearVariant(
    "fp8 KV",
    {"engine": {"kv_dtype": "fp8_e4m3"}},
    0.4,  # seen: at most 0.25 on tiny families, 0.01 on SmolLM2
    (("wrong scales", scale_fp8_scales, None), ("a flipped exponent bit", flip_scale_exponent, 1)),
)
WEIGHTS = (
    NearVariant("int8 weights", {"model": {"quantization": "int8"}}, 0.05, chooses_experts_anew=True),
    NearVariant("int4 weights", {"model": {"quantization": "int4"}}, 0.4, chooses_experts_anew=True),
)
OF_RANDOM_WEIGHTS = 3.0  # times the tolerance of weights: logits of noise are flatter; a random token is 2.5 off


async def run_near(verifier: Verifier, transport: str, variant: NearVariant, *, slack: float = 1.0) -> None:
    """Add the rows of one variant. slack: what its tolerance is multiplied by."""
    verifier.progress(variant.name)
    async with verifier.cluster(transport, overrides=variant.overrides) as cluster:
        answers = await same_on_every_path(verifier, cluster, variant)
        if variant.controls:
            row = VerifyRow(
                f"{variant.name}: flipped bit of a scale refused",
                Must.FAIL_CHECKSUM,
                (CONTROL,),
                cold=True,
                during=(FLIPPED_SCALE,),
            )
            await run_row(verifier, cluster, row, verifier.prompts)
    await within_tolerance(verifier, variant, answers, slack)
    if not variant.controls:
        return
    async with verifier.cluster(transport, "off", variant.overrides) as cluster:
        for what, change, most in variant.controls:
            await leaves_tolerance(verifier, cluster, variant, what, change, most)


async def same_on_every_path(verifier: Verifier, cluster: LocalCluster, variant: NearVariant) -> list[ServedAnswer]:
    """Add the row that one worker, two workers, and two with a cache give the same tokens.

    Returns the first's answers.
    """
    row = verifier.report.row(f"{variant.name}: aggregated = disaggregated = cached")
    answers: list[ServedAnswer] = []
    for prompt in verifier.prompts:
        served = []
        for force, is_cold in (("local", True), ("remote", True), ("remote", False)):
            if is_cold:
                await reset_caches(cluster)
            served.append(await verifier.serve(cluster, prompt, force))
        if failed := [answer.error for answer in served if answer.error is not None]:
            row.check(f"{prompt.name}: {failed[0]}", holds=False)
            continue
        answers.append(served[0])
        for answer in served[1:]:
            row.compare(prompt.name, served[0].tokens, answer.tokens)
    return answers


async def within_tolerance(
    verifier: Verifier,
    variant: NearVariant,
    answers: Sequence[ServedAnswer],
    slack: float = 1.0,
    gaps_of: Callable[..., list[float]] = logit_gaps,
) -> None:
    """Add the row that every answer is near float32's choice."""
    most = variant.tolerance * slack
    row = verifier.report.row(f"{variant.name}: within {most:g} deviations of float32's choice")
    gaps = await _gaps(verifier, answers, gaps_of)
    mean, worst = sum(gaps) / max(len(gaps), 1), max(gaps, default=math.inf)
    note = f"mean {mean:.3f}, worst {worst:.3f}; {gaps.count(0.0)} of {len(gaps)} as float32"
    if variant.chooses_experts_anew and ModelSpec.from_folder(verifier.model_dir).experts is not None:
        # rounded weights may route a token to another expert: a jump, however small the rounding
        gaps, note = sorted(gaps)[: -(-len(gaps) // 2)], f"the better half, since routing changes; {note}"
    for gap in gaps:
        row.check(note, holds=gap <= most)


async def leaves_tolerance(
    verifier: Verifier, cluster: LocalCluster, variant: NearVariant, what: str, change: Change, most: int | None
) -> None:
    """Add the control that damage in flight, with checks off, is further off than the tolerance."""
    name = f"{variant.name}, checks off: {what} leaves the tolerance".replace("scales leaves", "scales leave")
    row = VerifyRow(name, Must.ANYTHING, (CONTROL,), cold=True, during=(in_flight(change, most=most),))
    answers = await run_row(verifier, cluster, row, verifier.prompts)
    for gap in await _gaps(verifier, answers, logit_gaps):
        verifier.report.rows[-1].check(f"{gap:.2f} deviations off", holds=gap > variant.tolerance)


async def _gaps(
    verifier: Verifier, answers: Sequence[ServedAnswer], gaps_of: Callable[..., list[float]]
) -> list[float]:
    texts = [answer.prompt.token_ids for answer in answers], [answer.tokens for answer in answers]
    return await asyncio.to_thread(gaps_of, verifier.model_dir, *texts)
