"""Rows about numbers that are not float32: 16-bit models, fp8 KV, and quantised weights.

Tokens then differ from float32's wherever two are close. 16-bit models: log-probabilities of a fixed text from the
product (`prompt_logprobs`) and from Hugging Face in float32; how far off they may be is how far Hugging Face is off
with all numbers rounded to the dtype. Controls: the rotary base, or one layer's weights, a little wrong. Where a row of
a batch gets the same bits whatever else is in it, log-probabilities of generated tokens must be the same bits on every
path. Control: lowest bits of KV that change in flight.

fp8 KV and quantised weights: how far a token's logit is below the best one's by Hugging Face in float32
(`logit_gaps`); the tokens must be the same on every path. Controls: wrong scales, one flipped bit of a scale.
"""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrelay.cluster.launch.local import LocalCluster
from kvrelay.cluster.verify.prompts import VerifyPrompt, log_probabilities, logit_gaps
from kvrelay.cluster.verify.rows import Case, Must, OwnRows, Setup, VerifyRow, during
from kvrelay.cluster.verify.steering import Change, flip_lowest_bits, flip_scale_exponent, in_flight, scale_fp8_scales
from kvrelay.cluster.verify.verifier import Overrides, RowResult, ServedAnswer, Verifier, reset_caches
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.plane.messages import TokenLogprob

if TYPE_CHECKING:
    import torch

TEXT = Path(__file__).with_name("text.txt")
TOP = 20  # tokens that are compared at every position, beside the text's own
RMS_MOST = 2.0  # times Hugging Face's error; seen: 0.9 to 1.2
DEVIATIONS = 4.0  # of a mean's standard error
THETA_FACTOR = 1.5  # of the rotary base, in the control
LAYER_FACTORS = {"bfloat16": 1.1, "float16": 1.02}  # rounding alone is up to 0.4 % of each weight in bfloat16
_TOP_OUT = 5  # likeliest tokens that are compared beside each generated one
_CONTROL = "3 blocks"


TextLogprobs = tuple["torch.Tensor", "torch.Tensor"]
"""Of some tokens at each position of a text, its next token first: (tokens, log-probabilities in float64)."""


@dataclass(frozen=True, slots=True)
class DtypeError:
    """How far a model is from float32 on the same tokens. In nats; agreement as a share of the positions."""

    rms: float
    worst: float
    surprise: float  # mean negative log-probability of the text minus float32's: the logarithm of perplexities' ratio
    spread: float  # root mean square of that by position
    agreement: float  # of the likeliest token
    num_positions: int

    def excess(self, theirs: "DtypeError") -> list[str]:
        """In what this is further off than `theirs`, Hugging Face in the same dtype, explains."""
        chance = DEVIATIONS / math.sqrt(self.num_positions)  # times a standard deviation: of a mean over the positions
        deviation = math.sqrt(theirs.agreement * (1 - theirs.agreement) + 1 / self.num_positions)
        found = []
        if not self.rms <= RMS_MOST * theirs.rms:
            found.append(f"log-probabilities {self.rms:.2g} off, Hugging Face's {theirs.rms:.2g}")
        if not abs(self.surprise) <= abs(theirs.surprise) + chance * theirs.spread:
            found.append(f"perplexity {math.expm1(self.surprise):+.2%}")
        if not self.agreement >= theirs.agreement - chance * deviation:
            found.append(f"the best token in {self.agreement:.1%}, Hugging Face's in {theirs.agreement:.1%}")
        return found

    def __str__(self) -> str:
        return f"rms {self.rms:.2g}, perplexity {math.expm1(self.surprise):+.2%}, best token in {self.agreement:.1%}"


def dtype_error(parts: Iterable[TextLogprobs], exact: "torch.Tensor") -> DtypeError:
    """exact: float32's log-probabilities [positions of all parts, vocabulary]."""
    import torch

    tokens, logprobs = map(torch.cat, zip(*parts, strict=True))
    error = logprobs - exact.gather(1, tokens)
    return DtypeError(
        rms=float(error.square().mean().sqrt()),
        worst=float(error.abs().max()),
        surprise=-float(error[:, 0].mean()),
        spread=float(error[:, 0].square().mean().sqrt()),
        agreement=float((tokens[:, 1] == exact.argmax(1)).double().mean()),
        num_positions=len(error),
    )


def of_prompt(logprobs: Sequence[TokenLogprob]) -> TextLogprobs:
    """What was served with a prompt."""
    import torch

    pairs = torch.tensor([[(one.token_id, one.logprob), *one.top] for one in logprobs], dtype=torch.float64)
    return pairs[..., 0].long(), pairs[..., 1]


def on_same_tokens(logprobs: "torch.Tensor", text: list[int], top: int) -> TextLogprobs:
    """The text's tokens and the likeliest ones, of log-probabilities [positions, vocabulary]."""
    import torch

    tokens = torch.cat((torch.tensor(text[1:]).unsqueeze(1), logprobs.topk(top, dim=-1).indices), 1)
    return tokens, logprobs.gather(1, tokens)


class DtypeRows:
    """The rows of the verifier's 16-bit dtype. stands_alone: see Backend.is_batch_invariant."""

    def __init__(self, verifier: Verifier, transport: str, scratch: Path, *, stands_alone: bool) -> None:
        """scratch: a folder for changed copies of the model."""
        from kvrelay.serve.text.tokenizer import Tokenizer

        self._verifier, self._transport, self._scratch = verifier, transport, scratch
        self._stands_alone = stands_alone
        text, most = Tokenizer(verifier.model_dir).encode(TEXT.read_text()), verifier.longest_prompt
        pieces = [text[at : at + most] for at in range(0, min(len(text), 3 * most), most)]
        self._pieces = [piece for piece in pieces if len(piece) > most // 2]

    def setups(self) -> list[Setup]:
        dtype = self._verifier.dtype
        rows = [
            OwnRows((f"{dtype}: a text's log-probabilities, {path}",), partial(self._text, force))
            for force, path in (("local", "aggregated"), ("remote", "disaggregated"))
        ]
        names = [f"{dtype}: log-probabilities {{how}}, {path}" for path in ("disaggregated", "cached", "batched")]
        control = f"{dtype}: lowest bits changed in flight, checks off, change log-probabilities"
        rows.append(OwnRows((*names, control), self._paths))
        setups = [Setup(f"Hugging Face's log-probabilities, float32 and {dtype}", tuple(rows), self._transport, "off")]
        layer = partial(_scale_first_layer, factor=LAYER_FACTORS[dtype])
        for what, change in (("the rotary base", _scale_rotary_base), ("one layer's weights", layer)):
            row = OwnRows((f"{dtype}: {what} a little wrong is out of bounds",), self._control)
            copy = partial(self._changed_model, self._scratch / what.replace(" ", "-"), change)
            setups.append(Setup(what, (row,), self._transport, overrides=copy, num_prefill=0))
        return setups

    def _changed_model(self, folder: Path, change: Callable[[Path], None]) -> dict[str, dict[str, str]]:
        return {"model": {"source": str(_changed_copy(self._verifier.model_dir, folder, change))}}

    async def _text(self, force: str, verifier: Verifier, cluster: LocalCluster, row: RowResult) -> None:
        ours, theirs, excess = await self._excess(cluster, force)
        row.check("; ".join(excess) or f"{ours} (Hugging Face: {theirs})", holds=not excess)

    async def _control(self, verifier: Verifier, cluster: LocalCluster, row: RowResult) -> None:
        *_, excess = await self._excess(cluster, "local")
        row.check("; ".join(excess) or "UNDETECTED: within bounds", holds=bool(excess))

    @cached_property
    def _reference(self) -> tuple["torch.Tensor", DtypeError]:
        """Float32's log-probabilities, and how far Hugging Face is from them in the dtype."""
        import torch

        exact = torch.cat(log_probabilities(self._verifier.model_dir, self._pieces))
        half = log_probabilities(self._verifier.model_dir, self._pieces, self._verifier.dtype)
        top = min(TOP, exact.shape[1])
        found = [on_same_tokens(one, piece, top) for one, piece in zip(half, self._pieces, strict=True)]
        return exact, dtype_error(found, exact)

    async def _excess(self, cluster: LocalCluster, force: str) -> tuple[DtypeError, DtypeError, list[str]]:
        """How far off this cluster's model and Hugging Face are, and what that does not explain.

        Raises KvrelayError.
        """
        exact, theirs = await asyncio.to_thread(lambda: self._reference)
        top, found = min(TOP, exact.shape[1]), []
        for index, piece in enumerate(self._pieces):
            answer = await self._serve(cluster, VerifyPrompt(f"text {index}", piece), force, prompt_logprobs=top)
            found.append(of_prompt(answer.prompt_logprobs))
        ours = dtype_error(found, exact)
        return ours, theirs, ours.excess(theirs)

    async def _serve(self, cluster: LocalCluster, prompt: VerifyPrompt, force: str, **sampling: Any) -> ServedAnswer:
        """Raises KvrelayError."""
        request = self._verifier.request(prompt, **sampling)
        return (await self._verifier.serve(cluster, prompt, force, request)).checked()

    async def _paths(self, verifier: Verifier, cluster: LocalCluster, *results: RowResult) -> None:
        """Generated tokens' log-probabilities on each path are those of one worker alone; the last row is the control.

        Where rows depend on their batch, they may differ by twice Hugging Face's largest error.
        """
        _, theirs = await asyncio.to_thread(lambda: self._reference)
        bound = 0.0 if self._stands_alone else 2 * theirs.worst
        *rows, control = results

        async def logprobs(prompt: VerifyPrompt, force: str) -> list[TokenLogprob]:
            return (await self._serve(cluster, prompt, force, logprobs=_TOP_OUT)).logprobs[0]

        alone = {}
        for prompt in verifier.prompts:
            await reset_caches(cluster)
            alone[prompt.name] = await logprobs(prompt, "local")
        for row, is_cold, is_batched in zip(rows, (True, False, True), (False, False, True), strict=True):
            row.name = row.name.format(how=f"within {bound:.2g}" if bound else "bit for bit")
            if is_cold:
                await reset_caches(cluster)
            forces = cycle(("local", "remote") if is_batched else ("remote",))
            served = (logprobs(prompt, force) for prompt, force in zip(verifier.prompts, forces, strict=False))
            found = await asyncio.gather(*served) if is_batched else [await one for one in served]
            for prompt, got in zip(verifier.prompts, found, strict=True):
                at = first_difference(alone[prompt.name], got, bound)
                note = f"{sum(map(len, alone.values()))} tokens" if at is None else f"{prompt.name}: token {at}"
                row.check(note, holds=at is None)
        await reset_caches(cluster)
        async with in_flight(flip_lowest_bits)(Case(verifier, cluster, control)):
            got = await logprobs(verifier.prompt(_CONTROL), "remote")
        changed = first_difference(alone[_CONTROL], got, 0.0) is not None
        control.check("they changed" if changed else "UNDETECTED: the same bits", holds=changed)


def first_difference(wanted: Sequence[TokenLogprob], got: Sequence[TokenLogprob], most: float) -> int | None:
    """The first token at which log-probabilities differ by more than `most`, or None. most 0: by any bit.

    Where tokens differ, both must have been as likely within twice `most`; what follows is another text and not
    compared.
    """
    for at, (one, other) in enumerate(zip(wanted, got, strict=False)):
        if most == 0.0 and one != other:
            return at
        if one.token_id != other.token_id:
            near = dict(one.top).get(other.token_id, -math.inf)
            return None if abs(one.logprob - near) <= 2 * most else at
        if abs(one.logprob - other.logprob) > most:
            return at
    return None if len(wanted) == len(got) > 0 else min(len(wanted), len(got))


def _changed_copy(model_dir: Path, folder: Path, change: Callable[[Path], None]) -> Path:
    """A copy of a model's folder, of links to its files, into which `change` writes files of its own."""
    folder.mkdir()
    for path in model_dir.iterdir():
        (folder / path.name).symlink_to(path.resolve())
    change(folder)
    return folder


def _scale_rotary_base(folder: Path) -> None:
    """Multiply every rotary base in the configuration by THETA_FACTOR."""

    def changed(values: dict[str, Any]) -> dict[str, Any]:
        return {key: value * THETA_FACTOR if key == "rope_theta" else value for key, value in values.items()}

    path = folder / "config.json"
    text = json.dumps(json.loads(path.read_text(), object_hook=changed))
    path.unlink()  # a link
    path.write_text(text)


def _scale_first_layer(folder: Path, factor: float) -> None:
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
