"""`kvrelay serve`'s flags as settings. Pure."""

from pathlib import Path
from typing import Any

import yaml

from kvrelay.config import Settings, in_one_line, load_settings, settings_from, with_secrets
from kvrelay.errors import ConfigError
from kvrelay.settings.engine import DEFAULT_MODEL


def with_pairs(sections: dict[str, dict[str, Any]], pairs: list[str]) -> dict[str, dict[str, Any]]:
    """A copy of these sections with `section.key=value` pairs over them. Raises ConfigError."""
    merged = {section: dict(values) for section, values in sections.items()}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        section, dot, key = name.partition(".")
        if not (equals and dot and key):
            raise ConfigError(f"--set {pair}: write section.key=value, for example engine.token_budget=1024")
        try:  # as YAML reads it: numbers, booleans, null, else the text
            merged.setdefault(section, {})[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {pair}: {in_one_line(error)}") from error
    return merged


def settings_from_flags(config: Path | None, flags: dict[str, dict[str, Any]], pairs: list[str]) -> Settings:
    """Settings from the file, then the flags (None: not given), then `section.key=value` pairs, with the environment's
    secrets.

    Raises:
        ConfigError: naming the key and the nearest known one.
    """
    settings = load_settings(config, with_pairs(flags, pairs))
    return with_secrets(with_absolute_source(settings))


def with_absolute_source(settings: Settings) -> Settings:
    """The settings with absolute paths to models, templates, keys and past days: replicas run in other folders."""
    data = settings.model_dump(exclude_unset=True)
    for section, key, source in (
        ("model", "source", settings.model.source),
        ("model", "chat_template", settings.model.chat_template),
        ("engine", "draft_model", settings.engine.draft_model),
        ("serve", "api_keys_file", settings.serve.api_keys_file),
        ("planner", "history", settings.planner.history),
    ):
        if source is not None and source != DEFAULT_MODEL and (path := Path(source).expanduser()).exists():
            data.setdefault(section, {})[key] = str(path.resolve())
    return settings_from(data)
