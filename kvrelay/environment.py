"""The only reader of environment variables that are no settings of a section.

KVRELAY_API_KEY and KVRELAY_SECRET (secrets; KVRELAY_API_KEY_FILE and KVRELAY_SECRET_FILE name files with them),
KVRELAY_CACHE (the cache folder), KVRELAY_NATIVE (compiled kernels on or off), KVRELAY_LOG_LEVEL and KVRELAY_LOG_FILE
(log messages), and variables of Ray, Hugging Face and OpenTelemetry. Imports nothing of ours but errors.
"""

import logging
import os
from pathlib import Path

from kvrelay.errors import ConfigError

API_KEY_VARIABLE = "KVRELAY_API_KEY"
SECRET_VARIABLE = "KVRELAY_SECRET"
LOG_LEVEL_VARIABLE = "KVRELAY_LOG_LEVEL"
LOG_FILE_VARIABLE = "KVRELAY_LOG_FILE"
LOG_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


_taken: dict[str, str] = {}  # secrets that are no longer in the environment


def environment_api_key() -> str | None:
    """KVRELAY_API_KEY, else what the file KVRELAY_API_KEY_FILE holds; None: neither is set. Raises ConfigError."""
    return _secret(API_KEY_VARIABLE)


def environment_secret() -> str | None:
    """KVRELAY_SECRET, else what the file KVRELAY_SECRET_FILE holds; None: neither is set. Raises ConfigError."""
    return _secret(SECRET_VARIABLE)


def take_secrets() -> list[str]:
    """Take the secrets out of this process's environment, so that no child gets them. Returns them; the functions
    above have them as before.
    """
    for name in (API_KEY_VARIABLE, SECRET_VARIABLE):
        if value := os.environ.pop(name, ""):
            _taken[name] = value
    return list(_taken.values())


def _secret(name: str) -> str | None:
    if value := os.environ.get(name) or _taken.get(name):
        return value
    if not (file := os.environ.get(f"{name}_FILE")):
        return None
    try:
        value = Path(file).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}_FILE: {file}: {error}") from error
    if not value:
        raise ConfigError(f"{name}_FILE: {file} is empty")
    return value


def ray_dashboard_address() -> str | None:
    """The variables in which Ray's own commands look for the dashboard: those of `ray job` and of `serve`."""
    return os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_DASHBOARD_ADDRESS") or None


def cache_dir() -> Path:
    """Where converted checkpoints and compiled kernels are kept."""
    if env := os.environ.get("KVRELAY_CACHE"):
        return Path(env).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvrelay"


def log_level() -> int:
    """KVRELAY_LOG_LEVEL, a name of LOG_LEVELS, as logging's number; without one that it knows WARNING."""
    return LOG_LEVELS.get(os.environ.get(LOG_LEVEL_VARIABLE, "").lower(), logging.WARNING)


def log_file() -> Path | None:
    """KVRELAY_LOG_FILE: a file that processes of one machine append their messages to."""
    return Path(name) if (name := os.environ.get(LOG_FILE_VARIABLE)) else None


def native_disabled() -> bool:
    """KVRELAY_NATIVE=0 turns the compiled CPU kernels off (they fall back to torch)."""
    return os.environ.get("KVRELAY_NATIVE", "1") == "0"


def trace_exporters() -> list[str]:
    """Where spans go, by OpenTelemetry's own variables: OTEL_TRACES_EXPORTER, else OTLP when an endpoint is set."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return []
    has_endpoint = any(
        os.environ.get(name) for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    )
    names = os.environ.get("OTEL_TRACES_EXPORTER") or ("otlp" if has_endpoint else "")
    return [name for part in names.split(",") if (name := part.strip()) not in ("", "none")]


def otlp_protocol() -> str:
    """OpenTelemetry's variables for it: "http/protobuf" (its default) or "grpc"."""
    own = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
    return own or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "http/protobuf"


def hub_offline() -> bool:
    """Whether Hugging Face's own switches forbid the network."""
    return any(
        os.environ.get(name, "0").lower() in ("1", "true", "yes") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )
