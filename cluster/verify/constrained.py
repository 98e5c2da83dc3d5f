"""Rows about constrained output: grammars, allowed tokens, bad words, bias and thinking give Hugging Face's tokens on
every path.

Controls: without its constraints a request is answered otherwise, and so it is by an engine whose masks are off.
"""

import asyncio
import itertools
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from kvrelay.cluster.launch.local import LocalCluster
from kvrelay.cluster.verify import steering as steer
from kvrelay.cluster.verify.constrained_oracle import Oracle
from kvrelay.cluster.verify.prompts import VerifyPrompt
from kvrelay.cluster.verify.rows import Must, OwnRows, Setup, VerifyRow, blocks_freed
from kvrelay.cluster.verify.suites import HITS_CACHE, PARTLY_ACCEPTED, PLACES
from kvrelay.cluster.verify.verifier import RowResult, Verifier, reset_caches
from kvrelay.engine.scheduling.preempt import PreemptionMode
from kvrelay.plane.messages import GrammarSpec, Group, Sampling, SequenceRequest, Thinking
from kvrelay.serve.text.tokenizer import Tokenizer

NUM_OUTPUT = 40  # tokens: more than other rows', so that an output gets beyond its first string
PLAIN = "no constraint"
QUICK = ("JSON schema", "regex")
SEEDS = (11, 12, 13)

_SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 6},
        "size": {"enum": ["small", "größer", "🙂"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 99},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["title", "size", "count", "tags"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "string", "pattern": "^[a-c]{2,4}$"}},
}
_LARK = """start: sum
sum: product (" + " product)+
product: NUMBER (" * " NUMBER)*
NUMBER: /[1-9][0-9]{0,3}/
"""
_TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<call="],
        "tags": [
            {"begin": "<call=f>", "content": {"type": "json_schema", "json_schema": _SCHEMA}, "end": "</call>"},
            {"begin": "<call=g>", "content": {"type": "json_schema", "json_schema": {}}, "end": "</call>"},
        ],
        "at_least_one": True,
        "stop_after_first": True,
    },
}  # fmt: skip
GRAMMARS = {
    "JSON schema": GrammarSpec("json_schema", json.dumps(_SCHEMA)),
    "regex": GrammarSpec("regex", r"[0-9]{3}-[a-f]{2,8}(, \p{Lu}[a-z]+)*"),
    "Lark": GrammarSpec("lark", _LARK),
    "choice": GrammarSpec("lark", 'start: "an apple and a pear" | "größere Äpfel" | "🍎🍐🍎"'),
    "structural tag": GrammarSpec("structural_tag", json.dumps(_TAG)),
}


KINDS = (*GRAMMARS, "thinking budget", "allowed tokens", "bad words", "logit bias", "all together")


class ConstrainedPrompts:
    """Constrained requests of one model, by the name of their prompt. `learn` fills in what depends on the model."""

    def __init__(self, verifier: Verifier, kinds: Sequence[str] = KINDS) -> None:
        usual = [one for one in verifier.prompts if len(one.token_ids) + NUM_OUTPUT <= verifier.max_model_len]
        self.prompts = tuple(
            VerifyPrompt(f"{kind} after {one.name}", one.token_ids)
            for kind, one in zip((PLAIN, *kinds), itertools.cycle(usual), strict=False)
        )
        self.names = tuple(prompt.name for prompt in self.prompts[1:])
        self.masked = tuple(name for name in self.names if not name.startswith("logit bias"))  # by masks
        self.sampling: dict[str, dict[str, Any]] = {}
        self.expected: dict[str, list[int]] = {}
        self.permits: Callable[[Sequence[int]], bool] = lambda tokens: False  # by the JSON schema's grammar

    async def learn(self, verifier: Verifier, cluster: LocalCluster) -> None:
        """Fill in each request's constraints, and what Hugging Face generates within them."""
        if not self.expected:
            verifier.progress("Hugging Face generate within constraints (float32)")
            await asyncio.to_thread(self._learn, verifier)
        verifier.expected.update(self.expected)

    def _learn(self, verifier: Verifier) -> None:
        oracle, encode = (
            Oracle(verifier.model_dir),
            partial(Tokenizer(verifier.model_dir).encode, add_special_tokens=False),
        )
        self.permits = partial(oracle.permits, GRAMMARS["JSON schema"])
        for prompt in self.prompts:
            kind = prompt.name.partition(" after ")[0]
            plain = oracle.expected(prompt.token_ids, Sampling(max_tokens=NUM_OUTPUT, ignore_eos=True))
            own = constraints(kind, plain, encode)
            self.sampling[prompt.name] = {"max_tokens": NUM_OUTPUT, "ignore_eos": not own, **own}
            sampling = Sampling(**self.sampling[prompt.name])
            self.expected[prompt.name] = oracle.expected(prompt.token_ids, sampling) if own else plain

    def request(self, verifier: Verifier, prompt: VerifyPrompt, **changes: Any) -> SequenceRequest:
        return verifier.request(prompt, **self.sampling[prompt.name] | changes)

    def without(self, verifier: Verifier, prompt: VerifyPrompt) -> SequenceRequest:
        """The request without its constraints."""
        return verifier.request(prompt, max_tokens=NUM_OUTPUT, ignore_eos=False)


def constraints(kind: str, plain: Sequence[int], encode: Callable[[str], list[int]]) -> dict[str, Any]:
    """Of a request's sampling. plain: the greedy output without any; bans and biases forbid parts of it."""
    banned: dict[str, Any] = {"bad_words": (tuple(plain[:1]), tuple(plain[1:3]), tuple(encode("e")))}
    biased: dict[str, Any] = {"logit_bias": {plain[0]: -100.0, plain[-1]: 3.0, encode("a")[0]: 5.0}}
    thinking = Thinking(start=tuple(encode("<think>")), end=tuple(encode("</think>")), is_open=True, budget=7)
    if kind in GRAMMARS:
        return {"grammar": GRAMMARS[kind]}
    others: dict[str, dict[str, Any]] = {
        PLAIN: {},
        "thinking budget": {"thinking": thinking, "grammar": GRAMMARS["regex"]},
        "allowed tokens": {"allowed_token_ids": tuple(sorted({*encode("0123456789, abc xyz."), *plain[3:6]}))},
        "bad words": banned,
        "logit bias": biased,
        "all together": {"grammar": GrammarSpec("regex", "[a-z ]{30}\\.?"), **banned, **biased},
    }
    return others[kind]


def constrained(verifier: Verifier, transport: str) -> list[Setup]:
    """Every kind on every path of one cluster; pre-empted; drafted."""
    asked = ConstrainedPrompts(verifier)
    row = partial(VerifyRow, request=asked.request)
    own, changes = partial(row, prompts=asked.names), partial(VerifyRow, must=Must.ALL_CHANGE, prompts=asked.names)
    paths = (
        row("constrained: aggregated (one worker)", force="local"),
        row("constrained: disaggregated", cold=True),
        row("constrained: prefix-cached on both workers", during=(HITS_CACHE,)),
        row("constrained: batched with an unconstrained one", cold=True, together=True, force="local remote"),
        OwnRows(SAMPLED, partial(_serve_sampled, asked)),
        blocks_freed("constrained: every block freed"),
        changes("without their constraints the answers change", request=asked.without),
        masks_off(asked),
    )
    setups = [_setup("constrained output", asked, paths, transport)]
    for mode in map(str, PreemptionMode):
        rows: tuple[VerifyRow, ...] = (own(f"constrained, preempted: {mode}", during=(steer.preempting(mode),)),)
        overrides = {"engine": {"preemption": mode, "speculation": "off"}}
        setups.append(_setup(f"constrained, preemption: {mode}", asked, rows, transport, overrides))
    by_model = {"speculation": "model", "draft_model": str(verifier.model_dir)}
    for kind, engine in (("speculation", {}), ("draft model", by_model)):
        drafting = (steer.always_drafting(), PARTLY_ACCEPTED)
        rows = tuple(
            own(f"constrained, {kind} {where}", force=force, together=True, during=drafting) for force, where in PLACES
        )
        setups.append(_setup(f"constrained, {kind}", asked, rows, transport, {"engine": engine}))
    return setups


def masks_off(asked: ConstrainedPrompts) -> VerifyRow:
    """The control: the decode worker's sampler has no masks; it notices that an output leaves its grammar."""
    name, during = "masks switched off change the answers", (steer.without_masks(),)
    return VerifyRow(name, Must.ALL_CHANGE, asked.masked, "local", request=asked.request, during=during)


def quick(verifier: Verifier, transport: str) -> list[Setup]:
    """Two kinds on both paths, and the control."""
    asked = ConstrainedPrompts(verifier, QUICK)
    row = partial(VerifyRow, request=asked.request, cold=True)
    rows = (row("constrained: disaggregated", together=True), masks_off(asked))
    return [_setup("constrained output", asked, rows, transport)]


def _setup(
    title: str,
    asked: ConstrainedPrompts,
    rows: tuple[VerifyRow | OwnRows, ...],
    transport: str,
    overrides: dict[str, Any] | None = None,
) -> Setup:
    prepared = {"prompts": asked.prompts, "prepare": asked.learn, "learns": False}
    return Setup(title, rows, transport, overrides=overrides or {}, **prepared)  # type: ignore[arg-type]


SAMPLED = (
    "constrained, temperature 1: disaggregated = aggregated",
    f"constrained, n = {len(SEEDS)} disaggregated = single requests",
    "constrained, n and temperature 1: every token within the grammar",
)


async def _serve_sampled(
    asked: ConstrainedPrompts,
    verifier: Verifier,
    cluster: LocalCluster,
    disaggregated: RowResult,
    group: RowResult,
    within: RowResult,
) -> None:
    """Drawn outputs, which must also differ from each other."""
    for prompt in asked.prompts:
        sampled = partial(asked.request, verifier, prompt, temperature=1.0)

        async def serve(force: str, request: SequenceRequest, prompt: VerifyPrompt = prompt) -> list[list[int]]:
            await reset_caches(cluster)
            return (await verifier.serve(cluster, prompt, force, request)).checked().choices

        alone = [(await serve("local", sampled(seed=seed)))[0] for seed in SEEDS]
        disaggregated.compare(prompt.name, alone[0], (await serve("remote", sampled(seed=SEEDS[0])))[0])
        choices = await serve("remote", msgspec.structs.replace(sampled(), group=Group(seeds=SEEDS)))
        for one, other in zip(alone, choices, strict=True):
            group.compare(prompt.name, one, other)
        if prompt.name.startswith("JSON schema"):
            for tokens in (*alone, verifier.expected[prompt.name]):
                within.check("" if asked.permits(tokens) else f"{prompt.name}: outside", holds=asked.permits(tokens))
            within.check("the same three times", holds=len(set(map(tuple, alone))) > 1)
