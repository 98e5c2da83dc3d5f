"""Rows about 16-bit models: as near to float32 as Hugging Face is in that dtype, and the same bits on every path.

bfloat16's tokens differ from float32's wherever two are close. Compared are therefore log-probabilities of a fixed
text, each token given those before it, from the product (`prompt_logprobs`) and from Hugging Face in float32. How far
off they may be is measured too: it is how far Hugging Face is off with all numbers rounded to the dtype. Controls: the
rotary base, or one layer's weights, a little wrong.

Where a row of a batch gets the same bits whatever else is in it (the compiled CPU kernels), log-probabilities of
generated tokens must be the same bits on every path. Control: lowest bits of KV that change in flight.
"""

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrelay.cluster.launch.local import LocalCluster
from kvrelay.cluster.verify.damage import flip_lowest_bits, in_flight
from kvrelay.cluster.verify.hugging_face import log_probabilities
from kvrelay.cluster.verify.prompts import VerifyPrompt
from kvrelay.cluster.verify.rows import Case, OwnRows, Setup
from kvrelay.cluster.verify.verifier import RowResult, ServedAnswer, Verifier, reset_caches
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


@dataclass(frozen=True, slots=True)
class TextLogprobs:
    """Log-probabilities of some tokens at each position of a text, the text's next token first."""

    tokens: "torch.Tensor"  # [positions, 1 + TOP] int64
    logprobs: "torch.Tensor"  # [positions, 1 + TOP] float64


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


def dtype_error(found: TextLogprobs, exact: "torch.Tensor") -> DtypeError:
    """exact: float32's log-probabilities [positions, vocabulary]."""
    error = found.logprobs - exact.gather(1, found.tokens)
    best = found.tokens[:, 1] == exact.argmax(1)
    return DtypeError(
        rms=float(error.square().mean().sqrt()),
        worst=float(error.abs().max()),
        surprise=-float(error[:, 0].mean()),
        spread=float(error[:, 0].square().mean().sqrt()),
        agreement=float(best.double().mean()),
        num_positions=len(error),
    )


def of_prompt(logprobs: Sequence[TokenLogprob]) -> TextLogprobs:
    """What was served with a prompt."""
    import torch

    tokens = [[one.token_id, *(token for token, _ in one.top)] for one in logprobs]
    values = [[one.logprob, *(value for _, value in one.top)] for one in logprobs]
    return TextLogprobs(torch.tensor(tokens), torch.tensor(values, dtype=torch.float64))


def on_same_tokens(logprobs: "torch.Tensor", text: list[int], top: int) -> TextLogprobs:
    """The text's tokens and the likeliest ones, of log-probabilities [positions, vocabulary]."""
    import torch

    likeliest = logprobs.topk(top, dim=-1)
    own = torch.tensor(text[1:]).unsqueeze(1)
    values = torch.cat((logprobs.gather(1, own), likeliest.values), 1)
    return TextLogprobs(torch.cat((own, likeliest.indices), 1), values)


def concatenated(parts: Sequence[TextLogprobs]) -> TextLogprobs:
    import torch

    return TextLogprobs(torch.cat([part.tokens for part in parts]), torch.cat([part.logprobs for part in parts]))


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
        self._exact: torch.Tensor | None = None  # Hugging Face's log-probabilities in float32, and how far it is off
        self._theirs: DtypeError | None = None  # in the dtype

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

    async def _text(self, force: str, verifier: Verifier, cluster: LocalCluster, row: RowResult) -> None:
        exact, theirs = await asyncio.to_thread(self._reference)
        ours = await self._error_of(cluster, force, exact)
        excess = ours.excess(theirs)
        row.check("; ".join(excess) or f"{ours} (Hugging Face: {theirs})", holds=not excess)

    async def _control(self, verifier: Verifier, cluster: LocalCluster, row: RowResult) -> None:
        exact, theirs = await asyncio.to_thread(self._reference)
        excess = (await self._error_of(cluster, "local", exact)).excess(theirs)
        row.check("; ".join(excess) or "UNDETECTED: within bounds", holds=bool(excess))

    def _changed_model(self, folder: Path, change: Callable[[Path], None]) -> dict[str, dict[str, str]]:
        return {"model": {"source": str(_changed_copy(self._verifier.model_dir, folder, change))}}

    def _reference(self) -> tuple["torch.Tensor", DtypeError]:
        """Float32's log-probabilities, and how far Hugging Face is from them in the dtype; computed once."""
        import torch

        if self._exact is None or self._theirs is None:
            exact = log_probabilities(self._verifier.model_dir, self._pieces)
            half = log_probabilities(self._verifier.model_dir, self._pieces, self._verifier.dtype)
            top = min(TOP, exact[0].shape[1])
            found = [on_same_tokens(one, piece, top) for one, piece in zip(half, self._pieces, strict=True)]
            self._exact = torch.cat(exact)
            self._theirs = dtype_error(concatenated(found), self._exact)
        return self._exact, self._theirs

    async def _error_of(self, cluster: LocalCluster, force: str, exact: "torch.Tensor") -> DtypeError:
        """How far this cluster's model is off. Raises KvrelayError."""
        found = []
        for index, piece in enumerate(self._pieces):
            prompt = VerifyPrompt(f"text {index}", piece)
            answer = await self._serve(cluster, prompt, force, prompt_logprobs=min(TOP, exact.shape[1]))
            found.append(of_prompt(answer.prompt_logprobs))
        return dtype_error(concatenated(found), exact)

    async def _serve(self, cluster: LocalCluster, prompt: VerifyPrompt, force: str, **sampling: Any) -> ServedAnswer:
        """Raises KvrelayError."""
        request = self._verifier.request(prompt, **sampling)
        return (await self._verifier.serve(cluster, prompt, force, request)).checked()

    async def _logprobs(self, cluster: LocalCluster, prompt: VerifyPrompt, force: str) -> list[TokenLogprob]:
        return (await self._serve(cluster, prompt, force, logprobs=_TOP_OUT)).logprobs[0]

    async def _paths(self, verifier: Verifier, cluster: LocalCluster, *results: RowResult) -> None:
        """Generated tokens' log-probabilities on each path are those of one worker alone; the last row is the control.

        Where rows depend on their batch, they may differ by twice Hugging Face's largest error.
        """
        _, theirs = await asyncio.to_thread(self._reference)
        bound = 0.0 if self._stands_alone else 2 * theirs.worst
        *rows, control = results
        for row in rows:
            row.name = row.name.format(how=f"within {bound:.2g}" if bound else "bit for bit")
        alone = {}
        for prompt in verifier.prompts:
            await reset_caches(cluster)
            alone[prompt.name] = await self._logprobs(cluster, prompt, "local")
        await reset_caches(cluster)
        note = f"{sum(map(len, alone.values()))} tokens"
        for row in rows:
            if row is rows[-1]:  # batched
                await reset_caches(cluster)
                forces = ("remote" if index % 2 else "local" for index in range(len(verifier.prompts)))
                pairs = zip(verifier.prompts, forces, strict=True)
                found = await asyncio.gather(*(self._logprobs(cluster, *pair) for pair in pairs))
            else:
                found = [await self._logprobs(cluster, prompt, "remote") for prompt in verifier.prompts]
            for prompt, got in zip(verifier.prompts, found, strict=True):
                at = first_difference(alone[prompt.name], got, bound)
                row.check(note if at is None else f"{prompt.name}: token {at}", holds=at is None)
        await reset_caches(cluster)
        async with in_flight(flip_lowest_bits)(Case(verifier, cluster, control)):
            got = await self._logprobs(cluster, verifier.prompt(_CONTROL), "remote")
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

    def changed(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: inner * THETA_FACTOR if key == "rope_theta" else changed(inner) for key, inner in value.items()}

    config = json.loads((folder / "config.json").read_text())
    _replace(folder / "config.json", lambda path: path.write_text(json.dumps(changed(config))))


def _scale_first_layer(folder: Path, factor: float) -> None:
    """Multiply half of the rows of every matrix of layer 0: a norm that follows hides a common factor."""
    import torch
    from safetensors.torch import load_file, save_file

    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if ".layers.0." in name and tensor.dim() == 2:
                tensors[name] = torch.cat((tensor[: len(tensor) // 2] * factor, tensor[len(tensor) // 2 :]))
        _replace(path, lambda path, tensors=tensors: save_file(tensors, path, {"format": "pt"}))  # type: ignore[misc]


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file where a link was."""
    path.unlink()
    write(path)
