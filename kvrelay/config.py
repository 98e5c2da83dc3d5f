"""All settings: one frozen model with a section for each part, filled from a YAML file and command-line flags.

Unknown keys are refused, with the nearest known one named. The environment adds two secrets, so that they need not
stand in a file: KVRELAY_API_KEY and KVRELAY_SECRET.
"""

from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import ValidationError, model_validator

from kvrelay.environment import environment_api_key, environment_secret
from kvrelay.errors import ConfigError
from kvrelay.settings.cache import CacheSettings, StoreSettings, TransferSettings
from kvrelay.settings.cluster import ClusterSettings, PlannerSettings, ServeSettings
from kvrelay.settings.engine import EngineSettings, ModelSettings, RoleSettings
from kvrelay.settings.router import RouterSettings, SchedulerSettings, SloSettings
from kvrelay.settings.section import Section, first_problem
from kvrelay.types import Role


class Settings(Section):
    """All sections."""

    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    prefill: RoleSettings = RoleSettings()
    decode: RoleSettings = RoleSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    cache: CacheSettings = CacheSettings()
    store: StoreSettings = StoreSettings()
    transfer: TransferSettings = TransferSettings()
    router: RouterSettings = RouterSettings()
    slo: SloSettings = SloSettings()
    serve: ServeSettings = ServeSettings()
    cluster: ClusterSettings = ClusterSettings()
    planner: PlannerSettings = PlannerSettings()

    @model_validator(mode="after")
    def _check(self) -> Self:
        settings = {role: self.for_role(role) for role in Role}
        compute = {self.key_of(role, "dtype"): one.model.compute_dtype for role, one in settings.items()}
        kv = {self.key_of(role, "kv_dtype"): one.kv_dtype for role, one in settings.items()}
        for dtypes in (compute, kv):
            if len(set(dtypes.values())) > 1 and not self.transfer.convert_dtype:
                found = " and ".join(f"{key} is {dtype}" for key, dtype in dtypes.items())
                raise ValueError(f"{found}: set them alike, or transfer.convert_dtype to true")
        return self

    @property
    def kv_dtype(self) -> str:
        """The type of KV in a pool: `engine.kv_dtype`, or else the model's."""
        return self.model.compute_dtype if self.engine.kv_dtype == "auto" else self.engine.kv_dtype

    def for_role(self, role: Role) -> "Settings":
        """One role's settings: its section merged into `engine` and `model.dtype`, with the role sections left
        empty.
        """
        own = self._own(role).model_dump(exclude_none=True)
        dtype = own.pop("dtype", self.model.dtype)
        return self.model_copy(
            update={
                "model": self.model.model_copy(update={"dtype": dtype}),
                "engine": self.engine.model_copy(update=own),
                "prefill": RoleSettings(),
                "decode": RoleSettings(),
            }
        )

    def key_of(self, role: Role, name: str) -> str:
        """The dotted name under which this role's `name`, a key of RoleSettings, is set; for messages."""
        if getattr(self._own(role), name) is not None:
            return f"{role}.{name}"
        return f"model.{name}" if name == "dtype" else f"engine.{name}"

    def _own(self, role: Role) -> RoleSettings:
        return self.prefill if role is Role.PREFILL else self.decode

    @property
    def tokens_per_hash(self) -> int:
        """Tokens that one block hash covers: the smallest block size of any role, so that each role can match its own
        blocks.
        """
        return min(self._own(role).block_size or self.engine.block_size for role in Role)


def settings_from(data: dict[str, Any]) -> Settings:
    """Checked settings from nested plain data. Raises ConfigError naming the key."""
    try:
        return Settings.model_validate(data)
    except ValidationError as error:
        parents = error.errors()[0]["loc"][:-1]
        section: Any = Settings.model_fields[str(parents[0])].annotation if parents else Settings
        known = section.model_fields if len(parents) < 2 else ()  # none inside a setting that is a mapping
        # without the cause: `serve status` shows the whole chain, in which the reason must stand last and alone
        raise ConfigError(first_problem(error, "configuration", known, noun="setting", depth=2)) from None


def planner_settings_from(data: dict[str, Any]) -> PlannerSettings:
    """The section `planner` alone. Raises ConfigError naming the key."""
    return settings_from({"planner": data}).planner


def load_settings(path: str | Path | None, overrides: dict[str, dict[str, Any]] | None = None) -> Settings:
    """Settings from a YAML file, then `overrides` (section -> key -> value; None means not given)."""
    data: dict[str, Any] = {}
    if path is not None:
        try:
            data = yaml.safe_load(Path(path).read_text()) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"{path}: {in_one_line(error)}") from error
        _require_sections(path, data)
    data = {
        section: values for section, values in data.items() if values is not None
    }  # "engine:" with all commented out
    for section, values in (overrides or {}).items():
        given = {key: value for key, value in values.items() if value is not None}
        if given:
            data[section] = {**data.get(section, {}), **given}
    return settings_from(data)


_FOREIGN_FILES = {  # a top-level key that only such a file has -> what it is, and the command that takes it
    "applications": "a Ray Serve file: serve deploy",
    "apiVersion": "a Kubernetes file: kubectl apply -f",
    "available_node_types": "a Ray cluster file: ray up",
}


def _require_sections(path: str | Path, data: object) -> None:
    """Raises ConfigError unless it is a mapping of sections to mappings."""
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected sections such as model:, engine:, cluster:")
    for key, kind in _FOREIGN_FILES.items():
        if key in data:
            raise ConfigError(f"{path} holds no kvrelay settings; it is {kind} {path}")
    for section, values in data.items():
        if section in Settings.model_fields and not isinstance(values, dict | None):
            raise ConfigError(f"{path}: {section}: expected settings as `key: value`, not {values!r}")
        if not isinstance(section, str):
            raise ConfigError(f"{path}: unknown setting {section!r}")


def in_one_line(error: Exception) -> str:
    """An error's message without YAML's excerpts of the text, which take several lines."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem:
        where = f" (line {error.problem_mark.line + 1})" if error.problem_mark else ""
        return f"{error.problem}{where}"
    return " ".join(str(error).split())


def with_secrets(settings: Settings) -> Settings:
    """The settings, with the API key and the cluster's secret from the environment where they have none.

    Raises ConfigError: see `check_sealed`.
    """
    secret = settings.cluster.secret or environment_secret()
    check_sealed(settings, has_secret=secret is not None)
    cluster = settings.cluster.model_copy(update={"secret": secret})
    return with_api_key(settings, environment_api_key()).model_copy(update={"cluster": cluster})


def check_sealed(settings: Settings, *, has_secret: bool) -> None:
    """Raises ConfigError: sealed blocks would outlive a random secret. `has_secret`: the cluster was given one."""
    cache = settings.cache
    outliving = cache.disk_path or (settings.store.disk_path if cache.remote == "cluster" else cache.remote)
    if cache.sealed and outliving and not has_secret:
        raise ConfigError(
            "cache.sealed: blocks on disk and in stores can be opened only with the secret that sealed them, and "
            "without cluster.secret (or KVRELAY_SECRET) each start makes another: set it, for example to the output "
            "of `openssl rand -hex 32`"
        )


def with_api_key(settings: Settings, api_key: str | None) -> Settings:
    """The settings, with this API key where they have none."""
    serve = settings.serve.model_copy(update={"api_key": settings.serve.api_key or api_key})
    return settings.model_copy(update={"serve": serve})
