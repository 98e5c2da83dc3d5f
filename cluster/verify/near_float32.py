"""Rows about fp8 KV and quantised weights: tokens that float32 would nearly have chosen, and the same on every path.

Such numbers differ from float32, so tokens differ wherever two are close. Compared is therefore how far a token's logit
is below the best one's by Hugging Face in float32 (`logit_gaps`). Controls of fp8 KV: with wrong scales, or one bit of
one scale's exponent flipped, the same prompt must be further off than the tolerance. That a prefill worker with weights
of another kind is refused is a matter of fingerprints (tests/engine/models/test_quantized.py).
"""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial

from kvrelay.cluster.launch.local import LocalCluster
from kvrelay.cluster.verify.damage import Change, flip_scale_exponent, in_flight, scale_fp8_scales
from kvrelay.cluster.verify.hugging_face import logit_gaps
from kvrelay.cluster.verify.rows import Case, Must, OwnRows, Setup, VerifyRow, during
from kvrelay.cluster.verify.verifier import Overrides, RowResult, ServedAnswer, Verifier, reset_caches
from kvrelay.engine.models.spec import ModelSpec

CONTROL = "one block"  # no window hides its first token


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


def near(transport: str, variant: NearVariant, *, slack: float = 1.0) -> list[Setup]:
    """The rows of one variant. slack: what its tolerance is multiplied by."""
    name, most, answers = variant.name, variant.tolerance * slack, list[ServedAnswer]()
    rows: list[VerifyRow | OwnRows] = [
        OwnRows((f"{name}: aggregated = disaggregated = cached",), partial(same_on_every_path, answers))
    ]
    if variant.controls:
        damage = (in_flight(flip_scale_exponent, most=1),)
        refused = f"{name}: flipped bit of a scale refused"
        rows.append(VerifyRow(refused, Must.FAIL_CHECKSUM, (CONTROL,), cold=True, during=damage))
    within = f"{name}: within {most:g} deviations of float32's choice"
    rows.append(OwnRows((within,), partial(within_tolerance, variant, most, answers)))
    setups = [Setup(name, tuple(rows), transport, overrides=variant.overrides)]
    if variant.controls:
        controls = tuple(leaves_tolerance(variant, *control) for control in variant.controls)
        setups.append(Setup(f"{name}, checks off", controls, transport, "off", variant.overrides))
    return setups


async def same_on_every_path(
    answers: list[ServedAnswer], verifier: Verifier, cluster: LocalCluster, row: RowResult
) -> None:
    """One worker, two workers, and two with a cache give the same tokens. Adds the first's answers to `answers`."""
    for prompt in verifier.prompts:
        served = []
        for force, is_cold in (("local", True), ("remote", True), ("remote", False)):
            if is_cold:
                await reset_caches(cluster)
            served.append((await verifier.serve(cluster, prompt, force)).checked())
        answers.append(served[0])
        for answer in served[1:]:
            row.compare(prompt.name, served[0].tokens, answer.tokens)


async def within_tolerance(
    variant: NearVariant,
    most: float,
    answers: Sequence[ServedAnswer],
    verifier: Verifier,
    cluster: LocalCluster,
    row: RowResult,
) -> None:
    """Every answer is near float32's choice."""
    gaps = await _gaps(verifier, answers)
    mean, worst = sum(gaps) / max(len(gaps), 1), max(gaps, default=math.inf)
    note = f"mean {mean:.3f}, worst {worst:.3f}; {gaps.count(0.0)} of {len(gaps)} as float32"
    if variant.chooses_experts_anew and ModelSpec.from_folder(verifier.model_dir).experts is not None:
        # rounded weights may route a token to another expert: a jump, however small the rounding
        gaps, note = sorted(gaps)[: -(-len(gaps) // 2)], f"the better half, since routing changes; {note}"
    for gap in gaps:
        row.check(note, holds=gap <= most)


def leaves_tolerance(variant: NearVariant, what: str, change: Change, most: int | None) -> VerifyRow:
    """The control: damage in flight, with checks off, is further off than the tolerance."""
    name = f"{variant.name}, checks off: {what} leaves the tolerance".replace("scales leaves", "scales leave")
    damage = (in_flight(change, most=most), _is_far_off(variant.tolerance))
    return VerifyRow(name, Must.ANYTHING, (CONTROL,), cold=True, during=damage)


@during
async def _is_far_off(case: Case, tolerance: float) -> AsyncIterator[None]:
    yield
    least = min(await _gaps(case.verifier, case.answers), default=0.0)
    case.result.check(f"{least:.2f} deviations off", holds=least > tolerance)


async def _gaps(verifier: Verifier, answers: Sequence[ServedAnswer]) -> list[float]:
    prompts = [one.prompt.token_ids for one in answers]
    return await asyncio.to_thread(logit_gaps, verifier.model_dir, prompts, [one.tokens for one in answers])
