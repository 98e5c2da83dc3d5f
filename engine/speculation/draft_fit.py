"""Finds and checks a model's draft model: same vocabulary, smaller. Reads files, no weights; imports no torch."""

import json
import logging
import math
from pathlib import Path
from typing import Any

from kvrelay.config import Settings
from kvrelay.engine.checkpoints.checkpoint import Progress, prepare_checkpoint
from kvrelay.engine.checkpoints.files import expected_shapes
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.errors import ConfigError
from kvrelay.settings.engine import ModelSettings

logger = logging.getLogger(__name__)

_KEY = "engine.draft_model"
_BITS = {"none": 16, "int8": 8, "int4": 4}


def prepare_draft_model(settings: Settings, folder: Path, progress: Progress | None = None) -> Path | None:
    """The folder of the draft model for the model in `folder`; None: no draft model is configured.

    Raises:
        ModelNotFound, CheckpointCorrupt, UnsupportedModel: as for a model.
        ConfigError: its vocabulary differs.
    """
    source = settings.engine.draft_source
    if source is None:
        return None
    own = prepare_checkpoint(ModelSettings(source=source), progress)
    check_vocabulary(folder, own)
    return own


def check_vocabulary(folder: Path, draft_folder: Path) -> None:
    """Raises ConfigError unless both models' ordinary tokens are the same; special tokens and padding may differ."""
    ours, theirs = _vocabulary(folder), _vocabulary(draft_folder)
    if ours is None or theirs is None:
        sizes = [ModelSpec.from_folder(one).vocab_size for one in (folder, draft_folder)]
        if sizes[0] != sizes[1]:
            raise ConfigError(f"{_KEY}: a vocabulary of {sizes[1]} tokens, but the model's has {sizes[0]}")
        return
    if ours == theirs:
        return
    token = min(ours.items() ^ theirs.items(), key=lambda item: (item[1], item[0]))[0]
    raise ConfigError(
        f"{_KEY}: the vocabulary of {draft_folder.name} differs from the model's: "
        f"token {token!r} is {_id(theirs, token)}, and "
        f"{_id(ours, token)} in the model's; a model of the same family is needed"
    )


def _id(vocabulary: dict[str, int], token: str) -> str:
    return f"number {vocabulary[token]}" if token in vocabulary else "none"


def _vocabulary(folder: Path) -> dict[str, int] | None:
    """Ordinary tokens by id, from tokenizer.json; None: there is none."""
    file = folder / "tokenizer.json"
    if not file.exists():
        return None
    try:
        data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        tokens = data["model"]["vocab"]
        special = {entry["content"] for entry in data.get("added_tokens") or ()}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}: this is no tokenizer ({error!r})") from error
    pairs = tokens.items() if isinstance(tokens, dict) else ((entry[0], index) for index, entry in enumerate(tokens))
    return {token: index for token, index in pairs if token not in special}


def weight_share(folder: Path, draft_folder: Path, settings: Settings) -> float:
    """Bytes of weights that a pass of the draft model reads, relative to a step of the model; warns above 1."""
    sizes = (_num_weights(draft_folder) * _BITS["none"], _num_weights(folder) * _BITS[settings.model.quantization])
    share = sizes[0] / sizes[1]
    if share >= 1.0:
        logger.warning("%s: its weights are %.1f times the model's: drafting with it cannot pay", _KEY, share)
    return share


def _num_weights(folder: Path) -> int:
    """Bytes that a decode step reads: all weights but embedding rows that are not also the head."""
    spec = ModelSpec.from_folder(folder)
    shapes = expected_shapes(spec)
    return sum(math.prod(shape) for name, shape in shapes.items() if spec.is_tied or name != "embed_tokens.weight")
