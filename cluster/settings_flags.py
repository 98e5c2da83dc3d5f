"""`kvrelay serve`'s flags as settings. Pure."""

from pathlib import Path
from typing import Any

from kvrelay.config import DEFAULT_MODEL, Settings, load_settings, settings_from


def settings_from_flags(config: Path | None, flags: dict[str, dict[str, Any]], pairs: list[str]) -> Settings:
    """The file, then the flags (None: not given), then `section.key=value` pairs, checked.

    Raises:
        ConfigError: naming the key and the nearest known one.
    """
    from kvrelay.errors import ConfigError

    overrides = {section: dict(values) for section, values in flags.items()}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        section, dot, key = name.partition(".")
        if not (equals and dot and key):
            raise ConfigError(f"--set {pair}: write section.key=value, for example engine.token_budget=1024")
        overrides.setdefault(section, {})[key] = plain_value(value)
    settings = load_settings(config, overrides)
    return with_absolute_source(settings)


def plain_value(text: str) -> Any:
    """A flag's text as YAML reads it: numbers, booleans, null, else the text."""
    import yaml

    return yaml.safe_load(text)


def with_absolute_source(settings: Settings) -> Settings:
    """Workers run in other folders: a path to a model must not depend on ours."""
    source = Path(settings.model.source).expanduser()
    if settings.model.source == DEFAULT_MODEL or not source.exists():
        return settings
    data = settings.model_dump(exclude_unset=True)
    data.setdefault("model", {})["source"] = str(source.resolve())
    return settings_from(data)
