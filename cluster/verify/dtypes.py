"""`kvrelay verify`'s rows about 16-bit models: as near to float32 as Hugging Face is in that dtype, and the same bits on every way.

bfloat16's tokens part from float32's wherever two are close, so what is compared is what the model says of a fixed text, each
token given those before it: log-probabilities of the next token and of the likeliest ones, through the product itself
(`prompt_logprobs`), against Hugging Face in float32. What may be off is told by Hugging Face too: by how much the same model
is off there, on the same text, with all numbers rounded to the dtype. Controls: the rotary base, or one layer's weights, a
little wrong.

Where a row of a batch gets the same bits whatever else is in it (the compiled CPU kernels), log-probabilities of generated
tokens must be the same bits whichever way a prompt was served. Control: KV that changed in flight.
"""

import asyncio
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvrelay.cluster.verify.rows import Case, Row, Verifier, tampering, target_of
from kvrelay.errors import KvrelayError
from kvrelay.kernels.backend import Backend
from kvrelay.plane.messages import SequenceRequest, TokenLogprob
from kvrelay.types import KvLayout

if TYPE_CHECKING:
    import torch

    from kvrelay.cluster.launch.local import LocalCluster

TEXT = Path(__file__).with_name("text.txt")
TOP = 20  # tokens that are compared at every position, beside the text's own
RMS_MOST = 2.0  # of Hugging Face's error; seen: 0.9 to 1.2
DEVIATIONS = 4.0  # of a mean's standard error
THETA_FACTOR = 1.5  # what the controls multiply by
LAYER_FACTORS = {"bfloat16": 1.1, "float16": 1.02}  # rounding alone is up to 0.4 % of each weight in bfloat16
_TOP_OUT = 5  # likeliest tokens that are compared beside each generated one
_CONTROL = "3 blocks"  # the case that the control spoils


@dataclass(frozen=True, slots=True)
class Said:
    """What a model says at the positions of a text: for each, log-probabilities of some tokens, the text's next one first."""

    tokens: "torch.Tensor"  # [positions, 1 + TOP] int64
    logprobs: "torch.Tensor"  # [positions, 1 + TOP] float64


@dataclass(frozen=True, slots=True)
class Off:
    """How far a model is from float32 on the same tokens. In nats; agreement as a share of the positions."""

    rms: float
    worst: float
    surprise: (
        float  # mean of the text's negative log-probabilities, less float32's: the logarithm of perplexities' ratio
    )
    spread: float  # root of the mean square of that, position by position
    agreement: float  # of the likeliest token
    num_positions: int

    def excess(self, theirs: "Off") -> list[str]:
        """In what this is further off than `theirs`, Hugging Face in the same dtype, explains."""
        chance = DEVIATIONS / math.sqrt(self.num_positions)  # times a standard deviation: of a mean over the positions
        wavering = math.sqrt(theirs.agreement * (1 - theirs.agreement) + 1 / self.num_positions)
        found = []
        if not self.rms <= RMS_MOST * theirs.rms:
            found.append(f"log-probabilities {self.rms:.2g} off, Hugging Face's {theirs.rms:.2g}")
        if not abs(self.surprise) <= abs(theirs.surprise) + chance * theirs.spread:
            found.append(f"perplexity {math.expm1(self.surprise):+.2%}")
        if not self.agreement >= theirs.agreement - chance * wavering:
            found.append(f"the best token in {self.agreement:.1%}, Hugging Face's in {theirs.agreement:.1%}")
        return found

    def __str__(self) -> str:
        return f"rms {self.rms:.2g}, perplexity {math.expm1(self.surprise):+.2%}, best token in {self.agreement:.1%}"


def off(said: Said, exact: "torch.Tensor") -> Off:
    """exact: float32's log-probabilities [positions, vocabulary]."""
    error = said.logprobs - exact.gather(1, said.tokens)
    best = said.tokens[:, 1] == exact.argmax(1)
    return Off(
        rms=float(error.square().mean().sqrt()),
        worst=float(error.abs().max()),
        surprise=-float(error[:, 0].mean()),
        spread=float(error[:, 0].square().mean().sqrt()),
        agreement=float(best.double().mean()),
        num_positions=len(error),
    )


def rows_stand_alone(backend: Backend, dtype: "torch.dtype") -> bool:
    """Whether the backend promises a row the same bits whatever else is in its batch: the compiled CPU kernels do."""
    import torch

    from kvrelay.kernels.cpu.native_kernels import NativeLinear

    return isinstance(backend.pack_linear(torch.zeros(16, 16, dtype=dtype, device=backend.device)), NativeLinear)


def said_by(logprobs: Sequence[TokenLogprob]) -> Said:
    """What came back with a prompt."""
    import torch

    tokens = [[one.token_id, *(token for token, _ in one.top)] for one in logprobs]
    values = [[one.logprob, *(value for _, value in one.top)] for one in logprobs]
    return Said(torch.tensor(tokens), torch.tensor(values, dtype=torch.float64))


def hugging_face(folder: Path, pieces: Sequence[list[int]], dtype: str = "float32") -> list["torch.Tensor"]:
    """Log-probabilities [positions, vocabulary] of each piece of text, in float64.

    In 16 bits: float32 with weights and every module's result rounded to them, because not every processor has products of
    such numbers that end in minutes. What happens inside of a module is not rounded, so that this is nearer to float32 than
    a model loaded in the dtype is.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        if dtype != "float32":
            _round_everything(model, getattr(torch, dtype))
        return [model(torch.tensor([piece])).logits[0, :-1].double().log_softmax(-1) for piece in pieces]


def _round_everything(model: Any, dtype: "torch.dtype") -> None:
    import torch

    def rounded(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(rounded, value))
        return value.to(dtype).float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    for parameter in model.parameters():
        parameter.copy_(rounded(parameter))
    for module in model.modules():
        module.register_forward_hook(lambda module, args, out: rounded(out))


def on_same_tokens(logprobs: "torch.Tensor", text: list[int], top: int) -> Said:
    """The text's tokens and the likeliest ones, by one's own choice."""
    import torch

    likeliest = logprobs.topk(top, dim=-1)
    own = torch.tensor(text[1:]).unsqueeze(1)
    return Said(
        torch.cat((own, likeliest.indices), 1), torch.cat((logprobs.gather(1, own), likeliest.values), 1)
    )  # fmt: skip


def together(parts: Sequence[Said]) -> Said:
    import torch

    return Said(torch.cat([part.tokens for part in parts]), torch.cat([part.logprobs for part in parts]))


class DtypeRows:
    """Runs the rows of one 16-bit dtype.

    most_tokens: of one piece of text. stands_alone: whether a row's bits do not depend on its batch.
    """

    def __init__(
        self, verifier: Verifier, model_dir: Path, transport: str, *, dtype: str, most_tokens: int, stands_alone: bool
    ) -> None:
        from kvrelay.serve.text.tokenizer import Tokenizer

        self._verifier, self._model_dir, self._transport = verifier, model_dir, transport
        self._dtype, self._stands_alone = dtype, stands_alone
        text = Tokenizer(model_dir).encode(TEXT.read_text())
        self._pieces = [text[at : at + most_tokens] for at in range(0, min(len(text), 3 * most_tokens), most_tokens)]
        self._pieces = [piece for piece in self._pieces if len(piece) > most_tokens // 2]

    async def run(self) -> None:
        from kvrelay.cluster.launch.local import local_cluster

        self._verifier.tell(f"Hugging Face's log-probabilities, float32 and {self._dtype}")
        exact, theirs = await asyncio.to_thread(self._yardstick)
        settings = self._verifier.settings_over(self._transport, "off")  # bits are compared here; and the control
        async with local_cluster(settings, self._model_dir) as cluster:
            for force, way in (("local", "aggregated"), ("remote", "disaggregated")):
                row = self._verifier.add_row(f"{self._dtype}: a text's log-probabilities, {way}")
                await self._text_row(row, cluster, force, exact, theirs)
            await self._changed_row(cluster, await self._ways_rows(cluster, 2 * theirs.worst))
        for what, spoil in (("the rotary base", _other_base), ("one layer's weights", self._other_layer)):
            with tempfile.TemporaryDirectory() as scratch:
                folder = await asyncio.to_thread(_spoiled, self._model_dir, Path(scratch) / "model", spoil)
                await self._control_row(f"{what} a little wrong", folder, exact, theirs)

    def _yardstick(self) -> tuple["torch.Tensor", Off]:
        """Float32's log-probabilities, and how far Hugging Face is from them in the dtype."""
        import torch

        exact = hugging_face(self._model_dir, self._pieces)
        half = hugging_face(self._model_dir, self._pieces, self._dtype)
        top = min(TOP, exact[0].shape[1])
        said = [on_same_tokens(one, piece, top) for one, piece in zip(half, self._pieces, strict=True)]
        return torch.cat(exact), off(together(said), torch.cat(exact))

    async def _off(self, cluster: "LocalCluster", force: str, exact: "torch.Tensor") -> Off:
        """How far this cluster's model is off. Raises KvrelayError."""
        said = []
        for index, piece in enumerate(self._pieces):
            case = Case(f"text {index}", piece)
            _, prompt = await self._logprobs_of(cluster, case, force, prompt_logprobs=min(TOP, exact.shape[1]))
            said.append(said_by(prompt))
        return off(together(said), exact)

    async def _text_row(
        self, row: Row, cluster: "LocalCluster", force: str, exact: "torch.Tensor", theirs: Off
    ) -> None:
        try:
            ours = await self._off(cluster, force, exact)
        except KvrelayError as error:
            row.claim(holds=False, note=str(error))
            return
        excess = ours.excess(theirs)
        row.claim(holds=not excess, note="; ".join(excess) or f"{ours} (Hugging Face: {theirs})")

    async def _logprobs_of(
        self, cluster: "LocalCluster", case: Case, force: str, **sampling: Any
    ) -> tuple[list[TokenLogprob], list[TokenLogprob]]:
        """Log-probabilities of generated tokens, and of the prompt's. Raises KvrelayError."""
        request: SequenceRequest = self._verifier.request_of(case)
        request = msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, **sampling))
        tokens: list[TokenLogprob] = []
        prompt: list[TokenLogprob] = []
        async for output in cluster.dispatcher.generate(request, force=force):  # type: ignore[arg-type]
            tokens += output.logprobs
            prompt = output.prompt_logprobs or prompt
        return tokens, prompt

    async def _ways_rows(self, cluster: "LocalCluster", most: float) -> list[list[TokenLogprob]]:
        """Generated tokens and their log-probabilities, each way against one worker's alone, which are returned.

        most: by how much log-probabilities may differ where rows depend on their batch.
        """
        cases, alone = self._verifier.cases, []
        for case in cases:
            await _forget(cluster)
            alone.append((await self._logprobs_of(cluster, case, "local", logprobs=_TOP_OUT))[0])
        await _forget(cluster)
        how = "bit for bit" if self._stands_alone else f"within {most:.2g}"
        for way in ("disaggregated", "cached", "batched"):
            row = self._verifier.add_row(f"{self._dtype}: log-probabilities {how}, {way}")
            if way == "batched":
                await _forget(cluster)
            found = await self._served(cluster, side_by_side=way == "batched")
            for case, wanted, got in zip(cases, alone, found, strict=True):
                at = first_other(wanted, got, 0.0 if self._stands_alone else most)
                row.claim(holds=at is None, note=f"{sum(map(len, alone))} tokens" if at is None else f"{case.name}: token {at}")  # fmt: skip
        return alone

    async def _served(self, cluster: "LocalCluster", *, side_by_side: bool) -> list[list[TokenLogprob]]:
        """Every case over the hop, or side by side, every other one over the hop. Raises KvrelayError."""
        cases = self._verifier.cases
        if not side_by_side:
            return [(await self._logprobs_of(cluster, case, "remote", logprobs=_TOP_OUT))[0] for case in cases]
        forces = ["remote" if index % 2 else "local" for index in range(len(cases))]
        asked = (self._logprobs_of(cluster, case, force, logprobs=_TOP_OUT) for case, force in zip(cases, forces, strict=True))  # fmt: skip
        return [tokens for tokens, _ in await asyncio.gather(*asked)]

    async def _changed_row(self, cluster: "LocalCluster", alone: list[list[TokenLogprob]]) -> None:
        """The comparison can fail: the lowest bits of numbers that no check sees changing in flight."""
        row = self._verifier.add_row(
            f"{self._dtype}: lowest bits changed in flight, checks off, change log-probabilities"
        )
        index = [case.name for case in self._verifier.cases].index(_CONTROL)
        await _forget(cluster)
        with _other_lowest_bits(cluster) as count:
            got, _ = await self._logprobs_of(cluster, self._verifier.cases[index], "remote", logprobs=_TOP_OUT)
        changed = first_other(alone[index], got, 0.0) is not None
        row.claim(holds=count() > 0 and changed, note="they changed" if changed else "UNDETECTED: the same bits")

    async def _control_row(self, what: str, folder: Path, exact: "torch.Tensor", theirs: Off) -> None:
        from kvrelay.cluster.launch.local import local_cluster

        row = self._verifier.add_row(f"{self._dtype}: {what} is out of bounds")
        plain = self._verifier.settings_over(self._transport, "full")
        settings = plain.model_copy(update={"model": plain.model.model_copy(update={"source": str(folder)})})
        async with local_cluster(settings, folder, num_prefill=0) as cluster:
            excess = (await self._off(cluster, "local", exact)).excess(theirs)
        row.claim(holds=bool(excess), note="; ".join(excess) or "UNDETECTED: within bounds")

    def _other_layer(self, folder: Path) -> None:
        _scale_first_layer(folder, LAYER_FACTORS[self._dtype])


def first_other(wanted: Sequence[TokenLogprob], got: Sequence[TokenLogprob], most: float) -> int | None:
    """The first token at which log-probabilities differ by more than `most`, or None. most 0: by any bit.

    Where tokens part, both must have been as likely by twice `most`; what follows is another text and not compared.
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


async def _forget(cluster: "LocalCluster") -> None:
    for member in cluster.members:
        await cluster.dispatcher.reset_cache(member.worker_id)


def _other_lowest_bits(cluster: "LocalCluster") -> AbstractContextManager[Callable[[], int]]:
    """Flip the lowest bit of every number of every region that the decode worker receives; yields a counter of regions."""

    def flip(region: "torch.Tensor", layout: KvLayout) -> None:
        region[:: layout.itemsize].bitwise_xor_(1)

    return tampering(target_of(cluster), flip)


def _spoiled(model_dir: Path, folder: Path, spoil: Callable[[Path], None]) -> Path:
    """A copy of a model's folder, of links to its files, that `spoil` may write files of its own into."""
    folder.mkdir()
    for path in model_dir.iterdir():
        (folder / path.name).symlink_to(path.resolve())
    spoil(folder)
    return folder


def _other_base(folder: Path) -> None:
    """Every rotary base in the configuration is THETA_FACTOR times as large."""

    def changed(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: inner * THETA_FACTOR if key == "rope_theta" else changed(inner) for key, inner in value.items()}

    config = json.loads((folder / "config.json").read_text())
    _replace(folder / "config.json", lambda path: path.write_text(json.dumps(changed(config))))


def _scale_first_layer(folder: Path, factor: float) -> None:
    """Half of the rows of every matrix of layer 0, times `factor`: a norm that follows hides what all have in common."""
    import torch
    from safetensors.torch import load_file, save_file

    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if ".layers.0." in name and tensor.dim() == 2:
                tensors[name] = torch.cat((tensor[: len(tensor) // 2] * factor, tensor[len(tensor) // 2 :]))
        _replace(path, lambda path, tensors=tensors: save_file(tensors, path, {"format": "pt"}))  # type: ignore[misc]


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """A file of its own where a link was."""
    path.unlink()
    write(path)
