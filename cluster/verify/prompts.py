"""The prompts of `kvrelay verify`: lengths at which engines fail, shared prefixes, repetition, several languages.

And what Hugging Face transformers computes for them in float32 on the CPU: the reference that rows are compared with.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

TEXT = Path(__file__).with_name("text.txt")
BLOCK_SIZE = 16
CHUNK = 64  # token budget of a step, so that prompts take several
_TEXTS = {
    "English": "The history of computing began long before the first electronic machines were built, and ",
    "German": "Die Größe der Blöcke wird über ein Verzeichnis verwaltet, damit spätere Anfragen schneller sind. ",
    "Chinese": "机器学习模型在推理时需要大量的内存来保存键值缓存。",
    "Russian": "Распределённая система должна переживать отказ любого узла без потери данных. ",
    "Arabic": "تتطلب النماذج اللغوية الكبيرة ذاكرة واسعة وسرعة عالية في نقل البيانات. ",
    "code": "def fib(n: int) -> int:\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n\n",
}
_NUM_SHARED = 8  # requests side by side over one prefix: so many that a GPU reads it once
_MOST_OWN = 20  # tokens of such a prompt after the prefix
_MOST_SHARED = 320  # tokens of the prefix
_PERIODS = (1, 3, 7, 20)  # tokens after which a prompt repeats itself
_REPEATING = 60  # tokens of such a prompt
_LATENT_LENGTHS = {"1 token": 1, "one block": BLOCK_SIZE, "block + 1": BLOCK_SIZE + 1, "several chunks": 2 * CHUNK + 5}


@dataclass(frozen=True, slots=True)
class VerifyPrompt:
    """One prompt. The name is unique within a model."""

    name: str
    token_ids: list[int]


def make_prompts(encode: Callable[[str], list[int]], *, max_model_len: int, num_output: int) -> list[VerifyPrompt]:
    """The prompts that most rows serve. Each leaves room for `num_output` tokens."""
    long = encode(_TEXTS["English"] * (max_model_len // 8))
    while len(long) < max_model_len:
        long += long
    near = max_model_len - num_output
    lengths = {
        "1 token": 1, "block - 1": BLOCK_SIZE - 1, "one block": BLOCK_SIZE, "block + 1": BLOCK_SIZE + 1,
        "3 blocks": 3 * BLOCK_SIZE, "several chunks": 2 * CHUNK + 5, "near the context limit": near,
    }  # fmt: skip
    prompts = [VerifyPrompt(name, long[:length]) for name, length in lengths.items() if 0 < length <= near]
    shared = long[5 : 5 + min(4 * BLOCK_SIZE, near // 2)]
    for index, name in enumerate(("code", "German")):
        prompts.append(VerifyPrompt(f"shared prefix {index}", shared + encode(_TEXTS[name])[:20]))
    prompts += [VerifyPrompt(name, encode(text)[:near]) for name, text in _TEXTS.items() if name != "English"]
    return [prompt for prompt in prompts if prompt.token_ids]


def shared_prompts(prompts: Sequence[VerifyPrompt], longest: int) -> list[VerifyPrompt]:
    """Prompts of at most `longest` tokens that share whole blocks; the first is the prefix and one token."""
    text = max(prompts, key=lambda prompt: len(prompt.token_ids)).token_ids
    prefix = text[: min(longest - _MOST_OWN, _MOST_SHARED) // BLOCK_SIZE * BLOCK_SIZE]
    own = [text[7 * index + 1 : 7 * index + 1 + _MOST_OWN - index] for index in range(_NUM_SHARED)]
    return [VerifyPrompt("the prefix", [*prefix, text[0]])] + [
        VerifyPrompt(f"shared {index}", [*prefix, text[-1 - index], *tail[1:]]) for index, tail in enumerate(own)
    ]


def unlike_prompts(
    prompts: Sequence[VerifyPrompt], longest: int, *, count: int = 4, length: int = _MOST_SHARED // 2
) -> list[VerifyPrompt]:
    """So many prompts of the same tokens that have no prefix in common."""
    tokens, length = sorted({token for prompt in prompts for token in prompt.token_ids}), min(longest, length)
    return [VerifyPrompt(f"unlike {seed}", random.Random(seed).choices(tokens, k=length)) for seed in range(count)]


def repeating_prompts(prompts: Sequence[VerifyPrompt], longest: int) -> list[VerifyPrompt]:
    """Prompts of at most `longest` tokens that repeat themselves, so that n-gram drafts are found."""
    text = max(prompts, key=lambda prompt: len(prompt.token_ids)).token_ids
    length = min(longest, _REPEATING)
    return [VerifyPrompt(f"repeats {n}", (text[:n] * (length // n + 1))[:length]) for n in _PERIODS]


def latent_prompts() -> list[VerifyPrompt]:
    """Prompts for the tiny model with latent attention, whose vocabulary has more than 253 tokens."""
    return [VerifyPrompt(name, [(37 * at + 11) % 250 + 3 for at in range(n)]) for name, n in _LATENT_LENGTHS.items()]


if TYPE_CHECKING:
    import torch


def expected_tokens(model_dir: Path, prompts: Sequence[VerifyPrompt], num_output: int) -> list[list[int]]:
    """Greedy tokens of each prompt, end-of-sequence ignored."""
    return [beams[0] for beams in expected_beams(model_dir, prompts, num_output, width=1)]


def expected_beams(
    model_dir: Path, prompts: Sequence[VerifyPrompt], num_output: int, *, width: int
) -> list[list[list[int]]]:
    """For each prompt the `width` best sequences of beam search, best first, end-of-sequence ignored."""
    import torch

    model = _float32(model_dir)
    for name in ("eos_token_id", "temperature", "top_p", "top_k"):
        setattr(model.generation_config, name, None)
    found: list[list[list[int]]] = []
    for prompt in prompts:
        ids = torch.tensor([prompt.token_ids])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_output,
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            pad_token_id=0,
        )
        found.append(out[:, len(prompt.token_ids) :].tolist())
    return found


def logit_gaps(model_dir: Path, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[float]:
    """For each answer: how far its tokens' logits are below the best ones, given the tokens before.

    The mean over the answer, in standard deviations of the logits. 0: the greedy choice; random tokens are about 3 off.
    """
    import torch

    model = _float32(model_dir)
    found: list[float] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids, chosen = torch.tensor([prompt + answer]), torch.tensor(answer)
        with torch.inference_mode():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        gap = logits.amax(1) - logits.gather(1, chosen[:, None])[:, 0]
        found.append(float((gap / logits.std(1)).mean()))
    return found


def log_probabilities(model_dir: Path, text: list[int]) -> "torch.Tensor":
    """Log-probabilities [positions, vocabulary] in float64 of the token after each of a text's tokens but the last."""
    import torch

    with torch.inference_mode():
        logprobs: torch.Tensor = _float32(model_dir)(torch.tensor([text])).logits[0, :-1].double().log_softmax(-1)
        return logprobs


def _float32(model_dir: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
