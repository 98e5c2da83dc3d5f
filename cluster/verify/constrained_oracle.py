"""What Hugging Face generates within a request's constraints: the reference of constrained rows. Greedy, float32, CPU.

Masks come from llguidance itself: nothing of kvrelay/grammar and of the engine is used, and a structural tag stands
here as a grammar that was written by hand. Each token's mask is that of a new matcher which is shown the whole output.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrelay.grammar.schema import WHITESPACE
from kvrelay.plane.messages import GrammarSpec, Sampling, Thinking

if TYPE_CHECKING:
    import torch

JSON_OPTIONS: Any = {"whitespace_pattern": WHITESPACE, "json_allow_general_unicode_escapes": True}  # as the product's
Allowed = Callable[[Sequence[int]], "torch.Tensor | None"]
"""The tokens that may follow an output, bool [vocabulary]; None: all."""


class Oracle:
    """One model. vocab_size: the width of its logits."""

    def __init__(self, model_dir: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from kvrelay.engine.models.spec import ModelSpec

        spec = ModelSpec.from_folder(model_dir)
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self._trie: Any = None
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
        self.vocab_size, self.eos_ids = spec.vocab_size, sorted(spec.eos_ids)
        for name in ("eos_token_id", "temperature", "top_p", "top_k"):
            setattr(self._model.generation_config, name, None)

    def expected(self, prompt: list[int], sampling: Sampling) -> list[int]:
        """Greedy tokens, the one that ends the output included."""
        import torch
        from transformers import LogitsProcessorList

        ids = torch.tensor([prompt])
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=sampling.max_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None if sampling.ignore_eos else self.eos_ids,
            logits_processor=LogitsProcessorList(self._processors(len(prompt), sampling)),
        )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    def permits(self, spec: GrammarSpec, tokens: Sequence[int]) -> bool:
        """Whether each of the tokens may follow those before it."""
        allowed = self._grammar(spec)
        masks = (allowed(tokens[:at]) for at in range(len(tokens)))
        return all(mask is None or bool(mask[token]) for token, mask in zip(tokens, masks, strict=True))

    def _processors(self, num_prompt: int, sampling: Sampling) -> list[Any]:
        """Hugging Face's where it has them; each is shown the output alone."""
        from transformers import NoBadWordsLogitsProcessor, SequenceBiasLogitsProcessor

        found: list[Any] = []
        if sampling.logit_bias:
            found.append(SequenceBiasLogitsProcessor({(one,): bias for one, bias in sampling.logit_bias.items()}))
        if sampling.bad_words:
            found.append(NoBadWordsLogitsProcessor([list(words) for words in sampling.bad_words]))
        found = [lambda ids, scores, one=one: one(ids[:, num_prompt:], scores) for one in found]
        allowed = self._grammar(sampling.grammar) if sampling.grammar is not None else None
        if sampling.thinking is not None:
            allowed = after_thinking(sampling.thinking, allowed or (lambda output: None), self.vocab_size)
        for rule in (allowed, self._listed(sampling.allowed_token_ids)):
            if rule is not None:
                found.append(lambda ids, scores, rule=rule: masked(scores, rule(ids[0, num_prompt:].tolist())))
        return found

    def _listed(self, token_ids: Sequence[int]) -> Allowed | None:
        import torch

        if not token_ids:
            return None
        listed = torch.zeros(self.vocab_size, dtype=torch.bool)
        listed[list(token_ids)] = True
        return lambda output: listed

    def _grammar(self, spec: GrammarSpec) -> Allowed:
        from llguidance import LLMatcher, grammar_from, hf

        tokenizer = self._trie = self._trie or hf.from_tokenizer(self._tokenizer, self.vocab_size, self.eos_ids)
        if spec.kind == "json_schema":
            grammar = LLMatcher.grammar_from_json_schema(spec.text, overrides=JSON_OPTIONS)
        elif spec.kind == "structural_tag":
            grammar = LLMatcher.grammar_from_lark(lark_of_calls(spec.text))
        else:
            grammar = grammar_from(spec.kind, spec.text)  # type: ignore[arg-type]

        def allowed(output: Sequence[int]) -> "torch.Tensor":
            matcher = LLMatcher(tokenizer, grammar, log_level=0)
            matcher.consume_tokens(list(output))
            assert not matcher.is_error(), matcher.get_error()
            return bits(matcher.compute_bitmask(), self.vocab_size)

        return allowed


def lark_of_calls(tag: str) -> str:
    """One call of the tags that a structural tag triggers, and nothing else."""
    calls = [
        f"{json.dumps(one['begin'])} %json {json.dumps(one['content']['json_schema'] | {'x-guidance': JSON_OPTIONS})} "
        f"{json.dumps(one['end'])}"
        for one in json.loads(tag)["format"]["tags"]
    ]
    return "start: " + " | ".join(calls)


def after_thinking(thinking: Thinking, allowed: Allowed, vocab_size: int) -> Allowed:
    """Anything while the output reasons, then `allowed`; at the end of its budget the end marker and nothing else."""
    import torch

    def rule(output: Sequence[int]) -> "torch.Tensor | None":
        begin = 0 if thinking.is_open else find(output, thinking.start)
        if begin is None:
            return allowed(output)
        if (end := find(output[begin:], thinking.end)) is not None:
            return allowed(output[begin + end :])
        reasoning, marker = tuple(output[begin:]), thinking.end
        if thinking.budget is None or len(reasoning) < thinking.budget:
            return None
        written = next(n for n in reversed(range(len(marker))) if reasoning[len(reasoning) - n :] == marker[:n])
        forced = torch.zeros(vocab_size, dtype=torch.bool)
        forced[marker[written]] = True
        return forced

    return rule


def find(output: Sequence[int], marker: Sequence[int]) -> int | None:
    """Position behind the first occurrence."""
    size, tokens = len(marker), tuple(output)
    return next((at + size for at in range(len(tokens) - size + 1) if tokens[at : at + size] == tuple(marker)), None)


def bits(mask: bytes, vocab_size: int) -> "torch.Tensor":
    """bool [vocab_size]; tokens behind the mask's end are not allowed."""
    import numpy as np
    import torch

    found = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")[:vocab_size].astype(bool)
    return torch.from_numpy(np.pad(found, (0, vocab_size - len(found))))


def masked(scores: "torch.Tensor", mask: "torch.Tensor | None") -> "torch.Tensor":
    return scores if mask is None else scores.masked_fill(~mask, float("-inf"))
