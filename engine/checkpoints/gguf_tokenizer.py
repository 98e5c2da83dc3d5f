"""Rebuilds tokenizer.json from a GGUF's vocabulary, exactly as the model was trained, or refuses.

Byte-level BPE is split by the pre-tokenizer that `tokenizer.ggml.pre` names; the merges of SentencePiece BPE are
recovered from the scores. Stock loaders miss the digit-splitting ones (smollm, starcoder, refact,
command-r) and `ignore_merges` (Llama 3), silently. Source of the patterns: the models' own tokenizer.json
and llama.cpp's llama-vocab.cpp.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.engine.checkpoints.gguf_config import Metadata
from kvrelay.errors import CheckpointCorrupt, UnsupportedModel

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "\u2581"
_INSTRUCTION = "[INST]"

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+TAIL|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*TAIL"

_LLAMA3 = rf"{_CONTRACTION}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTION}|{_WORDS}|\p{{N}}|{_REST}"
_TEKKEN = _CASED.replace("TAIL", "") + rf"|\p{{N}}|{_REST_SLASH}"
_GPT4O = _CASED.replace("TAIL", f"{_CONTRACTION}?") + rf"|\p{{N}}{{1,3}}|{_REST_SLASH}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Pre-tokenization: each pattern splits the pieces that the previous ones left."""

    patterns: tuple[str, ...]
    digits: bool = False  # split digits individually
    nfc: bool = False
    ignore_merges: bool = False  # a piece that is in the vocabulary is not split further
    adds_bos: bool = False  # if the file does not specify it


_BY_DIGITS = PreTokenizer((_GPT2,), digits=True)
_PLAIN = PreTokenizer((_GPT2,))
_LLAMA3_PRE = PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True)
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
_DEEPSEEK_CODER = PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+"), digits=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _LLAMA3_PRE),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer((_LLAMA3,))),
    "qwen2": PreTokenizer((_QWEN2,), nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez"), PreTokenizer((_QWEN2,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _BY_DIGITS),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"), _PLAIN),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), PreTokenizer((_GPT4O,))),
    "deepseek-coder": _DEEPSEEK_CODER,
    "default": _DEFAULT,
}


def write_tokenizer(meta: Metadata, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and, if the file has one, chat_template.jinja.

    Raises:
        UnsupportedModel: a tokenizer kind or pre-tokenizer that is not supported.
        CheckpointCorrupt: an inconsistent vocabulary.
    """
    tokens = [str(token) or f"[EMPTY_{at}]" for at, token in enumerate(meta.values.get("tokenizer.ggml.tokens", []))]
    if not tokens:
        raise CheckpointCorrupt(meta.source, "the file has no tokenizer vocabulary")
    kind = meta.values.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level(meta, tokens)
    elif kind == "llama":
        tokenizer, adds_bos = _sentencepiece(meta, tokens)
    else:
        raise UnsupportedModel(meta.source, f"tokenizer {kind!r}; known: gpt2 (byte-level BPE), llama (SentencePiece)")
    _add_special_tokens(tokenizer, meta, tokens)
    _add_template(tokenizer, meta, tokens, adds_bos)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(json.dumps(_config(meta, tokens), indent=2, ensure_ascii=False))
    if template := meta.values.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(str(template), encoding="utf-8")


def _token_types(meta: Metadata, tokens: list[str]) -> list[int]:
    types = meta.values.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointCorrupt(meta.source, f"{len(types)} token types for {len(tokens)} tokens")
    return [int(kind) for kind in types]


def _vocab(meta: Metadata, tokens: list[str]) -> dict[str, int]:
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise CheckpointCorrupt(meta.source, "the vocabulary has the same token twice")
    return vocab


def pre_tokenizer_for(meta: Metadata) -> PreTokenizer:
    """The pre-tokenizer that the file names. Files older than the key are refused, Qwen's excepted."""
    name = meta.values.get("tokenizer.ggml.pre")
    if name is None and meta.architecture in ("qwen2", "qwen3"):
        name = "qwen2"
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModel(
            meta.source,
            f"pre-tokenizer {name!r} (tokenizer.ggml.pre) is not known, and guessing it would give wrong "
            f"tokens silently; use the model's folder form, or a GGUF with one of: {', '.join(PRE_TOKENIZERS)}",
        )
    return PRE_TOKENIZERS[name]


def _byte_level(meta: Metadata, tokens: list[str]) -> tuple[Any, bool]:
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    pre = pre_tokenizer_for(meta)
    vocab = _vocab(meta, tokens)
    merges = [_pair(meta, merge) for merge in meta.values.get("tokenizer.ggml.merges", [])]
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges)
    except Exception as error:  # tokenizers raises plain Exception
        raise CheckpointCorrupt(meta.source, f"merges do not fit the vocabulary: {error}") from error
    tokenizer = Tokenizer(model)
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _splitter(pre)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False)
    return tokenizer, pre.adds_bos


def _pair(meta: Metadata, merge: str) -> tuple[str, str]:
    at = merge.find(" ", 1)
    if at < 0:
        raise CheckpointCorrupt(meta.source, f"merge {merge!r} is not two pieces")
    return merge[:at], merge[at + 1 :]


def _splitter(pre: PreTokenizer) -> Any:
    from tokenizers import Regex, pre_tokenizers

    parts: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre.digits else []
    if pre.patterns == (_GPT2,):  # ByteLevel's own pattern
        parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
    else:
        parts += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns]
        parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return parts[0] if len(parts) == 1 else pre_tokenizers.Sequence(parts)


def _sentencepiece(meta: Metadata, tokens: list[str]) -> tuple[Any, bool]:
    """BPE with byte fallback. A dummy space is put before each text, unless the file disables it (Gemma).

    The texts between special tokens get one too, as in these vocabularies' own tokenizer.json, unless
    the instruction marks are special tokens (Mistral v0.3): its chat template spells those spaces.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers.tokenization_utils_base import generate_merges

    types = _token_types(meta, tokens)
    # files have user-defined runs of spaces as real spaces; merges use the visible one
    known = set(tokens)
    runs = {token: _SPACE * len(token) for token in tokens if token and not token.strip(" ")}
    spelled = [runs[token] if token in runs and runs[token] not in known else token for token in tokens]
    vocab = _vocab(meta, spelled)
    unknown = meta.token("unknown")
    # control, byte and unused tokens are neither parts nor results of merges
    no_text = [token for token, kind in zip(spelled, types, strict=True) if kind not in (_NORMAL, _USER_DEFINED)]
    scores = dict(zip(spelled, _ranks(meta, spelled), strict=True))
    model = models.BPE(
        vocab=vocab,
        merges=generate_merges(vocab, scores, no_text),
        unk_token=None if unknown is None else spelled[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    has_prefix = bool(meta.values.get("tokenizer.ggml.add_space_prefix", True))
    to_visible, to_space = normalizers.Replace(" ", _SPACE), decoders.Replace(_SPACE, " ")
    steps = [to_space, decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix and (_INSTRUCTION, _CONTROL) in zip(tokens, types, strict=True):
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False)
    elif has_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), to_visible])
    else:
        tokenizer.normalizer = to_visible
    if has_prefix:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, True


def _ranks(meta: Metadata, tokens: list[str]) -> list[float]:
    """The merge rank of each token: by score; for Gemma by id, since its scores do not follow its merge order."""
    if meta.is_gemma:
        return [-float(index) for index in range(len(tokens))]
    scores = meta.values.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise CheckpointCorrupt(meta.source, "a SentencePiece vocabulary without a score for every token")
    return [float(score) for score in scores]


def _add_special_tokens(tokenizer: Any, meta: Metadata, tokens: list[str]) -> None:
    """Control tokens are special; user-defined ones are ordinary but never split. Ids are kept."""
    from tokenizers import AddedToken

    types = _token_types(meta, tokens)
    named = {meta.token(name) for name in ("bos", "eos", "eot", "eom", "padding")}
    special: list[Any] = []
    whole: list[Any] = []
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind in (_CONTROL, _UNKNOWN) or index in named:
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED and tokenizer.token_to_id(token) == index:
            whole.append(AddedToken(token, special=False, normalized=False))
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(whole)
    if tokenizer.get_vocab_size(with_added_tokens=True) != size:
        raise CheckpointCorrupt(meta.source, "a special token is not in the vocabulary")


def _add_template(tokenizer: Any, meta: Metadata, tokens: list[str], adds_bos: bool) -> None:
    """Add BOS and EOS as the file specifies, else by the tokenizer's default."""
    from tokenizers import processors

    bos = meta.token("bos") if bool(meta.values.get("tokenizer.ggml.add_bos_token", adds_bos)) else None
    eos = meta.token("eos") if bool(meta.values.get("tokenizer.ggml.add_eos_token", False)) else None
    if bos is None and eos is None:
        return
    before = [] if bos is None else [tokens[bos]]
    after = [] if eos is None else [tokens[eos]]
    pair = [f"{token}:1" for token in (*before, "$B", *after)]
    template = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *pair],
        special_tokens=[(tokens[index], index) for index in {bos, eos} if index is not None],
    )
    first = tokenizer.post_processor
    tokenizer.post_processor = template if first is None else processors.Sequence([first, template])


def _config(meta: Metadata, tokens: list[str]) -> dict[str, Any]:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {key: meta.token(name) for key, name in names.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(meta.need("context_length")),
        **{key: tokens[index] for key, index in special.items() if index is not None},
    }
