"""16-bit models under `kvrelay verify`: a device's kernels against the reference backend on that device.

What a worker answers, on whatever path, becomes a text for the reference (teacher forcing): an early tie between two
tokens makes no later one differ. The reference computes each text in one step, in float32 and in the dtype, KV in its
type too; how far its 16 bits are from its float32 bounds how far a worker may be from float32, in prompts
(`prompt_logprobs`) and in generated tokens: root mean square, perplexity and best token (closeness.py) over the TOP
likeliest tokens of each position; no log-probability further than WORST_MOST times the reference's largest error, the
bound; greedy tokens are float32's wherever its two best are further apart than that.

Controls that must leave the bounds: a reference with one layer's weights, or its rotary base, a little wrong, for every
row; KV that changes while it is decoded from or in flight; rows that share KV which is not theirs.
"""

import asyncio
import math
import statistics
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvrelay.cluster.launch.local import LocalCluster
from kvrelay.cluster.verify import computing, dtypes
from kvrelay.cluster.verify import steering as steer
from kvrelay.cluster.verify.closeness import RMS_MOST, DtypeError, TextLogprobs, WholeTexts, dtype_error, on_same_tokens
from kvrelay.cluster.verify.computing import GRAPHS, PIECES, steps_by
from kvrelay.cluster.verify.prompts import TEXT, VerifyPrompt, log_probabilities, shared_prompts, unlike_prompts
from kvrelay.cluster.verify.rows import Case, Must, OwnRows, Setup, VerifyRow, blocks_freed, during
from kvrelay.cluster.verify.verifier import Overrides, RowResult, ServedAnswer, Verifier
from kvrelay.plane.messages import SequenceRequest

FP8 = "fp8_e4m3"
TOP = 5  # likeliest tokens that are compared at every position, beside the text's own
WORST_MOST = 2.0
REFERENCE_MOST = 1.0  # nats, root mean square, that the reference's 16 bits may be off; seen: 0.14, with fp8 KV 0.65
NUM_TEXTS = 2
STEPS = {"speculation": "off", "token_budget": 128, "max_running": 16}  # prompts take several
CONTROL = ("3 blocks",)  # the prompt that controls damage
SMALL = ("1 token", "one block", "block + 1", "3 blocks", "several chunks", "shared prefix 0", "shared prefix 1")
HAS_GRAPHS, HAS_PIECES = partial(computing.captures, GRAPHS), partial(computing.captures, PIECES)
OTHER_FAMILIES = {"experts": "qwen3_moe", "latent attention": "deepseek_v3"}

Part = list[tuple[TextLogprobs, TextLogprobs, torch.Tensor, torch.Tensor]]
"""Some positions, text by text: as served, by the reference in 16 bits, in float32, and what both are judged by."""


@dataclass(frozen=True, slots=True)
class ParityVerdict:
    """Of a row's answers. excess: what the reference's own error does not explain. rms: that error, nats."""

    excess: list[str]
    note: str
    rms: float


class Parity:
    """The rows of one model whose KV is of one type. Rows add their answers, which controls compare again.

    Args:
        scratch: a folder for changed copies of the model.
        kv_dtype: auto, or a setting of engine.kv_dtype.
    """

    def __init__(self, verifier: Verifier, scratch: Path, kv_dtype: str = "auto") -> None:
        from kvrelay.serve.text.tokenizer import Tokenizer

        self.verifier, self._scratch = verifier, scratch
        self._kv_dtype = verifier.dtype if kv_dtype == "auto" else kv_dtype
        self._is_exact = stands_alone(verifier)
        folder, device = verifier.model_dir, verifier.report.device
        self.exact, self._half = WholeTexts(folder, device), WholeTexts(folder, device, verifier.dtype, self._kv_dtype)
        self._answers: dict[str, list[ServedAnswer]] = {}
        most = verifier.longest_prompt
        text = Tokenizer(verifier.model_dir).encode(TEXT.read_text())
        pieces = [text[at : at + most] for at in range(0, NUM_TEXTS * most, most)]
        texts = (VerifyPrompt(f"text {index}", piece) for index, piece in enumerate(pieces) if len(piece) > most // 2)
        own = [*(prompt for prompt in verifier.prompts if prompt.name in SMALL), *texts]
        shared = shared_prompts(verifier.prompts, most)
        unlike = unlike_prompts(verifier.prompts, most, count=len(shared) - 1, length=len(shared[-1].token_ids))
        names = (tuple(prompt.name for prompt in group) for group in (own, shared, unlike))
        self._names, self._shared, self._unlike = names
        self.prompts = (*own, *shared, *unlike)
        engine = {"kv_memory": replace(verifier, prompts=list(self.prompts)).kv_bytes, "kv_dtype": kv_dtype}
        self.overrides: Overrides = {"engine": STEPS | engine}

    # ---- comparison

    def compare(self, answers: Sequence[ServedAnswer], judge: WholeTexts | None = None) -> ParityVerdict:
        """Answers beside the reference. judge: in a control another float32."""
        parts: dict[str, Part] = {"prompts": [], "generated": []}
        for answer in answers:
            prompt, text = answer.prompt.token_ids, answer.prompt.token_ids + answer.tokens
            logprobs = {"prompts": answer.prompt_logprobs, "generated": answer.logprobs[0]}
            for name, first, end in (("prompts", 1, len(prompt)), ("generated", len(prompt), len(text))):
                if logprobs[name]:
                    whole = text[:end]
                    own = on_same_tokens(self._half(whole, first), whole[first - 1 :], TOP)
                    both = self.exact(whole, first), (judge or self.exact)(whole, first)
                    parts[name].append((dtypes.of_prompt(logprobs[name]), own, *both))
        errors = dict[str, tuple[DtypeError, DtypeError]]()
        for name, part in ((name, part) for name, part in parts.items() if part):
            served, half, exact, by = zip(*part, strict=True)
            errors[name] = dtype_error(served, torch.cat(by)), dtype_error(half, torch.cat(exact))
        bound = WORST_MOST * max(theirs.worst for _, theirs in errors.values())
        rms = max(theirs.rms for _, theirs in errors.values())
        decided, wrong = _greedy(parts["generated"], bound)
        excess, notes = [f"{wrong} of {decided} greedy tokens that float32 decides differ"] * (wrong > 0), []
        for name, (ours, theirs) in errors.items():
            excess += [f"{name}: {what}" for what in ours.excess(theirs)]
            if not ours.worst <= bound:
                excess.append(f"{name}: one log-probability {ours.worst:.2g} off, bound {bound:.2g}")
            if not theirs.rms <= REFERENCE_MOST:
                excess.append(f"{name}: the reference itself is {theirs.rms:.2g} off, which bounds nothing")
            notes.append(f"{name} rms {ours.rms:.2g} (reference {theirs.rms:.2g}), worst {ours.worst:.2g}")
        note = f"{', '.join(notes)}; bound {bound:.2g}, {decided} greedy tokens decided"
        return ParityVerdict(excess, note, rms)

    def request(self, verifier: Verifier, prompt: VerifyPrompt) -> SequenceRequest:
        """Greedy with log-probabilities: also the prompt's for texts."""
        is_text = prompt.name.startswith("text")
        return verifier.request(prompt, logprobs=TOP, prompt_logprobs=TOP if is_text else None)

    # ---- rows

    async def _anchor(self, verifier: Verifier, cluster: LocalCluster, row: RowResult) -> None:
        """The reference's float32 is nearer to Hugging Face's, on the CPU, than a tenth of what 16 bits are off."""
        text = next(prompt.token_ids for prompt in self.prompts if prompt.name == self._names[-1])
        expected = await asyncio.to_thread(log_probabilities, verifier.model_dir, text)
        exact, half = await asyncio.to_thread(lambda: (self.exact(text, 1), self._half(text, 1)))
        off, most = (float((one - expected).square().mean().sqrt()) for one in (exact, half))
        row.check(f"rms {off:.2g}, in 16 bits {most:.2g}", holds=off <= most / 10)

    def row(self, name: str, *more: Any, same_as: str | None = None, is_control: bool = False, **how: Any) -> VerifyRow:
        """Of all its prompts together. same_as: the row from which answers may differ as little as from float32."""
        asked: dict[str, Any] = {"cold": True, "together": True, "force": "local", "request": self.request}
        asked |= {"prompts": self._names} | how
        return VerifyRow(name, Must.ANYTHING, during=(judged(self, same_as, is_control=is_control), *more), **asked)

    def one_worker(self) -> Setup:
        """Steps of every kind on one worker."""
        group: dict[str, Any] = {"prompts": self._shared, "num_first": 1, "when": computing.reads_prefixes_once}
        unlike = group | {"prompts": self._unlike, "num_first": 0}
        eager, graphs, pieces, both = (steps_by(*kinds) for kinds in ((), (GRAPHS,), (PIECES,), (GRAPHS, PIECES)))
        saved = partial(steer.counted, "cascade_saved_tokens", note="{} tokens of KV not read again")
        nothing, wrongly = saved(holds=lambda num: num == 0), computing.sharing_unlike_kv()
        rows: list[VerifyRow | OwnRows] = [
            self.row("eager steps", eager),
            self.row("decode graphs", graphs, same_as="eager steps", when=HAS_GRAPHS),
            self.row("decode graphs, prompts in pieces", both, same_as="eager steps", when=HAS_PIECES),
            self.row("one request at a time", same_as="eager steps", together=False),
            self.row("cascade, eager", eager, saved(), **group),
            self.row("cascade in pieces", pieces, saved(), same_as="cascade, eager", **group | {"when": HAS_PIECES}),
            self.row("cascade: nothing in common, nothing shared", eager, nothing, **unlike),
            self.row("control: sharing KV of others", eager, saved(), wrongly, is_control=True, cold=False, **unlike),
            self.row(
                "control: KV changed while decoding",
                computing.changed_while_decoding(),
                is_control=True,
                prompts=CONTROL,
            ),
            blocks_freed("every block freed"),
            OwnRows(("the reference in float32 is Hugging Face's",), self._anchor),
        ]
        return self._setup("one worker", rows, "auto", num_prefill=0)

    def paths(self, transports: Sequence[str]) -> list[Setup]:
        """KV transferred over each transport, and damaged."""
        flip: dict[str, Any] = {"prompts": CONTROL, "force": "remote"}
        flipped, setups = steer.in_flight(steer.flip_exponent_bit, most=1), list[Setup]()
        for transport in transports:
            rows: list[VerifyRow | OwnRows] = [
                self.row(f"disaggregated over {transport}", force="remote", same_as="eager steps")
            ]
            if transport == transports[0]:
                rows.append(self.row("transferred and own prompts in one batch", force="local remote"))
            refused = f"flipped bit refused ({transport})"
            rows.append(VerifyRow(refused, Must.FAIL_CHECKSUM, cold=True, during=(flipped,), **flip))
            rows.append(blocks_freed(f"every block freed ({transport})"))
            setups.append(self._setup(f"prefill and decode over {transport}", rows, transport))
        row = self.row("control: flipped bit with checks off", flipped, is_control=True, **flip)
        return [*setups, self._setup("checks off", [row, *self.controls()], transports[0], checks="off")]

    def others(self, what: str, transport: str) -> Setup:
        """Of another model, or KV of another type: eager, captured where that is possible, and transferred."""
        eager = f"{what}: eager steps"
        rows: list[VerifyRow | OwnRows] = [
            self.row(eager, steps_by()),
            self.row(f"{what}: decode graphs", steps_by(GRAPHS), same_as=eager, when=HAS_GRAPHS),
            self.row(f"{what}: prompts in pieces", steps_by(PIECES), same_as=eager, when=HAS_PIECES),
            self.row(f"{what}: disaggregated over {transport}", force="remote", same_as=eager),
            *self.controls(f"{what}: "),
        ]
        if self._kv_dtype == FP8:
            scales: dict[str, Any] = {"is_control": True, "prompts": CONTROL, "force": "remote"}
            rows.append(self.row(f"{what}: control: wrong scales", steer.in_flight(steer.scale_fp8_scales), **scales))
        return self._setup(what, rows, transport, checks="off")

    def _setup(
        self, title: str, rows: Sequence[VerifyRow | OwnRows], transport: str, checks: str = "full", **more: Any
    ) -> Setup:
        return Setup(title, tuple(rows), transport, checks, self.overrides, prompts=self.prompts, learns=False, **more)

    # ---- controls

    def controls(self, what: str = "") -> list[OwnRows]:
        """Every row so far is out of bounds of a reference that is a little wrong."""
        layer = partial(dtypes.scale_first_layer, factor=dtypes.LAYER_FACTORS[self.verifier.dtype])
        changes = {"one layer's weights": layer, "the rotary base": dtypes.scale_rotary_base}
        return [
            OwnRows((f"{what}control: {name} a little wrong",), partial(self._against_wrong, name, change))
            for name, change in changes.items()
        ]

    async def _against_wrong(
        self, name: str, change: Any, verifier: Verifier, cluster: LocalCluster, row: RowResult
    ) -> None:
        folder = self._scratch / f"{self._kv_dtype} {name}".replace(" ", "-")
        await asyncio.to_thread(dtypes.changed_copy, verifier.model_dir, folder, change)
        wrong = WholeTexts(folder, verifier.report.device)
        for served, answers in self._answers.items():
            excess = (await asyncio.to_thread(self.compare, answers, wrong)).excess
            row.check("" if excess else f"UNDETECTED in {served}", holds=bool(excess))
        row.note = row.note or f"out of bounds in {row.passed} rows"

    async def judge(self, result: RowResult, answers: list[ServedAnswer], same_as: str | None) -> None:
        """A row's answers, which are kept for the controls. same_as: the row that they may differ from as little."""
        found = await asyncio.to_thread(self.compare, answers)
        result.check(holds=not found.excess)
        result.note = "; ".join(filter(None, [result.note, *(found.excess or [found.note])]))
        self._answers[result.name] = answers
        if same_as is not None:
            off, most = (
                rms_apart(self._answers.get(same_as, []), answers),
                0.0 if self._is_exact else RMS_MOST * found.rms,
            )
            result.check("" if off <= most else f"rms {off:.2g} from {same_as}, at most {most:.2g}", holds=off <= most)


def _greedy(part: Part, bound: float) -> tuple[int, int]:
    """How many tokens the judge decides by more than the bound; how many of those were other ones."""
    judge, chosen = torch.cat([one[3] for one in part]), torch.cat([served[0][:, 0] for served, *_ in part])
    best = judge.topk(2, dim=-1)
    decided = best.values[:, 0] - best.values[:, 1] > bound
    return int(decided.sum()), int((decided & (chosen != best.indices[:, 0])).sum())


def rms_apart(one: Sequence[ServedAnswer], other: Sequence[ServedAnswer]) -> float:
    """Between the log-probabilities of the same tokens, as far as answers to a prompt agree. Nats; inf: no answers."""
    others, errors = {answer.prompt.name: answer for answer in other}, list[float]()
    for answer in one:
        beside = others[answer.prompt.name]
        pairs = ((answer.prompt_logprobs, beside.prompt_logprobs), (answer.logprobs[0], beside.logprobs[0]))
        for ours, theirs in (pair for both in pairs for pair in zip(*both, strict=True)):
            near = {**dict(theirs.top), theirs.token_id: theirs.logprob}
            pool = {**dict(ours.top), ours.token_id: ours.logprob}
            errors += [value - near[token] for token, value in pool.items() if token in near]
            if ours.token_id != theirs.token_id:
                break
    return math.sqrt(statistics.fmean(error * error for error in errors)) if errors else math.inf


@during
async def judged(case: Case, parity: Parity, same_as: str | None, *, is_control: bool) -> AsyncIterator[None]:
    """The answers must be within the bounds; a control's must not."""
    yield
    if any(answer.error is not None for answer in case.answers):
        return  # the row has failed
    if not is_control:
        await parity.judge(case.result, case.answers, same_as)
        return
    found = await asyncio.to_thread(parity.compare, case.answers)
    case.result.check("; ".join(found.excess[:1]) or f"UNDETECTED: {found.note}", holds=bool(found.excess))


def stands_alone(verifier: Verifier) -> bool:
    """Whether a row of a batch gets the same bits whatever else is in it."""
    from kvrelay.kernels.select import select_backend

    backend = select_backend(verifier.backend, verifier.device, num_threads=1)  # type: ignore[arg-type]
    return backend.is_batch_invariant(getattr(torch, verifier.dtype))


def setups(
    verifier: Verifier, transports: Sequence[str], scratch: Path, *, is_all: bool = False, is_first: bool = False
) -> list[tuple[Verifier, Setup]]:
    """Steps of every kind, and transfers. is_all: fp8 KV too, and with the first model two families of other parts."""
    plain, first = Parity(verifier, scratch), transports[0]
    served = [(verifier, setup) for setup in (plain.one_worker(), *plain.paths(transports))]
    if is_all:
        served.append((verifier, Parity(verifier, scratch, FP8).others("fp8 KV", first)))
    for what, family in OTHER_FAMILIES.items() if is_all and is_first else ():
        own = verifier.of_family(family, scratch / family / "model", is_wide=True)
        served.append((own, Parity(own, scratch / family).others(what, first)))
    return served
