"""Writes a checkpoint of a model's first layers: a draft model that needs no download. What it guesses is only as good
as that is.

python -m bench.engine.truncated OUT [--model M] [--layers 4]
"""

import argparse
import json
import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from bench.engine import inprocess

_KEPT = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json")


def truncate(folder: Path, target: Path, num_layers: int) -> Path:
    """`target`, which then holds the embedding, the first `num_layers` layers, the final norm and the head."""
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = num_layers
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:num_layers]
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(config, indent=2))
    for name in _KEPT:
        if (folder / name).exists():
            shutil.copy(folder / name, target / name)
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            names = [name for name in weights.keys() if _layer_of(name) < num_layers]  # noqa: SIM118  # it is no dict
            tensors.update({name: weights.get_tensor(name) for name in names})
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _layer_of(name: str) -> int:
    """-1: of no layer."""
    parts = name.split(".")
    return int(parts[parts.index("layers") + 1]) if "layers" in parts else -1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    print(truncate(inprocess.prepare(options.model), options.out, options.layers))


if __name__ == "__main__":
    main()
