"""The same weights for kvrelay, vLLM and llama.cpp: a checkpoint folder and GGUF files of it, for bench/serving/cpu.py.

    python -m bench.serving.peer_models smollm2 qwen2.5-0.5b [--out ~/.cache/kvrelay/peers]
        --llama-source LLAMA_CPP_SOURCE --llama-bin FOLDER_OF_llama-quantize [--python PYTHON_FOR_THE_CONVERTER]

Makes OUT/NAME/checkpoint (config, safetensors, tokenizer) and OUT/NAME/{bf16,f16,q8_0,q4_1,q4_0}.gguf, and leaves what
is there. `smollm2` has its real weights. `qwen2.5-0.5b` has random weights of that model's exact shape and a made-up
tokenizer of its size: its texts are nonsense, its speed is not. The integers are llama-quantize's with --pure: all
products are of the one type, tied head included, as kvrelay's are (8.5, 5.0 and 4.5 bits per weight).

PYTHON needs torch, transformers and safetensors, and gguf's own dependencies (numpy, pyyaml, requests, sentencepiece);
default: the one that runs this. The made-up tokenizer is none that the converter knows: a line of its own code is
changed which pre-tokenizer to write (token-id prompts never meet it).
"""

import argparse
import itertools
import json
import os
import shutil
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from kvrelay.engine.checkpoints.checkpoint import prepare_checkpoint
from kvrelay.engine.checkpoints.tiny import random_weights
from kvrelay.settings.engine import ModelSettings

QWEN: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
    "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "bos_token_id": 151643,
    "eos_token_id": 151645, "dtype": "bfloat16", "hidden_act": "silu", "use_sliding_window": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}  # fmt: skip
MODELS = ("smollm2", "qwen2.5-0.5b")
INTEGERS = ("q8_0", "q4_1", "q4_0")
DEFAULT_OUT = Path("~/.cache/kvrelay/peers").expanduser()

_CONVERT = """
import runpy, sys
sys.path[:1] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer, name=sys.argv[2]: name
sys.argv[:] = [sys.argv[1] + "/convert_hf_to_gguf.py", *sys.argv[3:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def checkpoint_of(name: str, folder: Path) -> Path:
    """The folder with the model's safetensors, made when it is missing."""
    target = folder / "checkpoint"
    if (target / "model.safetensors").exists():
        return target
    if name == "smollm2":
        source = prepare_checkpoint(ModelSettings(), None)
        shutil.copytree(source, target, dirs_exist_ok=True)
    else:
        words_tokenizer(target, QWEN["vocab_size"])
        random_weights(QWEN, target, dtype=torch.bfloat16)
    return target


def words_tokenizer(folder: Path, size: int) -> None:
    """A byte-level BPE tokenizer of `size` tokens: the bytes, words of two and three letters, two special ones.

    Every token is readable text, so that a server streams each as it comes.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = string.ascii_letters + "_"
    pairs = ["".join(pair) for pair in itertools.product(letters, repeat=2)]
    triples = [pair + letter for pair in pairs for letter in letters]
    words = (pairs + triples)[: size - len(alphabet) - 2]
    vocab = {token: index for index, token in enumerate(alphabet + words)}
    merges = [(word[:-1], word[-1]) for word in words]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special.values()])
    assert tokenizer.get_vocab_size() == size
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def convert(checkpoint: Path, target: Path, kind: str, options: argparse.Namespace) -> None:
    """One 16-bit GGUF, by llama.cpp's own converter. Raises CalledProcessError."""
    if target.exists():
        return
    pre = "smollm" if "smollm" in str(checkpoint) else "qwen2"
    unfinished = target.with_suffix(".unfinished")
    arguments = [str(checkpoint), "--outtype", kind, "--outfile", str(unfinished)]
    command = [options.python, "-c", _CONVERT, str(options.llama_source), pre, *arguments]
    subprocess.run(command, check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    unfinished.rename(target)


def quantize(source: Path, target: Path, kind: str, binaries: Path) -> None:
    """One GGUF of integers out of a 16-bit one. Raises CalledProcessError."""
    if target.exists():
        return
    unfinished = target.with_suffix(".unfinished")
    command = [str(binaries / "llama-quantize"), "--pure", str(source), str(unfinished), kind.upper(), "2"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    unfinished.rename(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=MODELS)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--llama-source", type=Path, help="llama.cpp's folder; without it only checkpoints are made")
    parser.add_argument("--llama-bin", type=Path, help="where its llama-quantize lies; without it no integers are made")
    parser.add_argument("--python", default=sys.executable)
    options = parser.parse_args()
    for name in options.models:
        folder = options.out / name
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint = checkpoint_of(name, folder)
        if options.llama_source is not None:
            for kind in ("bf16", "f16"):
                convert(checkpoint, folder / f"{kind}.gguf", kind, options)
            if options.llama_bin is not None:
                for kind in INTEGERS:
                    quantize(folder / "bf16.gguf", folder / f"{kind}.gguf", kind, options.llama_bin)
        for file in sorted(folder.glob("*.gguf")):
            print(f"{file} {file.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
