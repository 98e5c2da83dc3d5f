"""Rows about numbers that are not float32: fp8 KV and quantised weights. And models that are a
little wrong, for parity.py.

Tokens then differ from float32's wherever two are close. What counts is how far a token's logit is below the best one's
by Hugging Face in float32 (`logit_gaps`); tokens must be the same on every path. Controls: wrong scales, one flipped
bit of a scale.
"""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrelay.cluster.launch.local import LocalCluster
from kvrelay.cluster.verify.closeness import TextLogprobs
from kvrelay.cluster.verify.prompts import logit_gaps
from kvrelay.cluster.verify.rows import Case, Must, OwnRows, Setup, VerifyRow, during
from kvrelay.cluster.verify.steering import Change, flip_scale_exponent, in_flight, scale_fp8_scales
from kvrelay.cluster.verify.verifier import Overrides, RowResult, ServedAnswer, Verifier, reset_caches
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.plane.messages import TokenLogprob

if TYPE_CHECKING:
    pass

THETA_FACTOR = 1.5  # of the rotary base, in the control
LAYER_FACTORS = {"bfloat16": 1.1, "float16": 1.02}  # rounding alone is up to 0.4 % of each weight in bfloat16


def of_prompt(logprobs: Sequence[TokenLogprob]) -> TextLogprobs:
    """What was served with a prompt."""
    import torch

    pairs = torch.tensor([[(one.token_id, one.logprob), *one.top] for one in logprobs], dtype=torch.float64)
    return pairs[..., 0].long(), pairs[..., 1]


def changed_copy(model_dir: Path, folder: Path, change: Callable[[Path], None]) -> Path:
    """A copy of a model's folder, of links to its files, into which `change` writes files of its own."""
    folder.mkdir()
    for path in model_dir.iterdir():
        (folder / path.name).symlink_to(path.resolve())
    change(folder)
    return folder


def scale_rotary_base(folder: Path) -> None:
    """Multiply every rotary base in the configuration by THETA_FACTOR."""

    def changed(values: dict[str, Any]) -> dict[str, Any]:
        return {key: value * THETA_FACTOR if key == "rope_theta" else value for key, value in values.items()}

    path = folder / "config.json"
    text = json.dumps(json.loads(path.read_text(), object_hook=changed))
    path.unlink()  # a link
    path.write_text(text)


def scale_first_layer(folder: Path, factor: float) -> None:
    """Multiply half of the rows of every matrix of layer 0: a norm that follows hides a common factor."""
    import torch
    from safetensors.torch import load_file, save_file

    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if ".layers.0." in name and tensor.dim() == 2:
                tensors[name] = torch.cat((tensor[: len(tensor) // 2] * factor, tensor[len(tensor) // 2 :]))
        path.unlink()  # a link
        save_file(tensors, path, {"format": "pt"})


# ---- fp8 KV and quantised weights

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
