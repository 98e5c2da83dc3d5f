"""The file of API keys (`serve.api_keys_file`): one tenant for each key, with its quotas. Pure.

Keys are 256 random bits, so one SHA-256 hides them; passwords would need a slow hash.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, Self

import yaml
from pydantic import Field, StrictBool, StrictInt, ValidationError, model_validator

from kvrelay.config import in_one_line
from kvrelay.errors import ConfigError
from kvrelay.settings.section import Section, Size, first_problem

DEFAULT_TENANT = "default"  # the name of the operator's own key, serve.api_key
MAX_PIN_SHARE = 0.5  # of a pool, that all tenants together may pin


class TenantEntry(Section):
    """One tenant. Quotas hold for the whole cluster; None: no limit, for `pin_share` and `store_bytes` that of every
    tenant, for `weight` what the settings say.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    key_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    shared: StrictBool = False  # its KV is in the namespace that all such tenants and serve.api_key share
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None  # in fair shares of computing time
    max_running: Annotated[StrictInt, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[StrictInt, Field(ge=1)] | None = None
    pin_share: Annotated[float, Field(ge=0, le=MAX_PIN_SHARE)] | None = None
    store_bytes: Size | None = None  # of the cluster's store, each copy counted

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.name == DEFAULT_TENANT:
            raise ValueError(f"the name {DEFAULT_TENANT} is that of serve.api_key")
        for name in ("pin_share", "store_bytes") if self.shared else ():
            if getattr(self, name) is not None:
                raise ValueError(f"{name} is of a namespace of its own: with shared: true, KV is the shared one's")
        return self


class KeyFile(Section):
    """The whole file. Names and keys are used once."""

    tenants: tuple[TenantEntry, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        for what in ("name", "key_sha256"):
            (value, count), *_ = Counter(getattr(one, what) for one in self.tenants).most_common(1) or [("", 0)]
            if count > 1:
                named = [one.name for one in self.tenants if getattr(one, what) == value]
                raise ValueError(f"{count} tenants have the same {what}: {', '.join(named)}")
        return self


def parse_keys(text: str, where: str) -> KeyFile:
    """The file's content. Raises ConfigError that begins with `where` and names the line, or the tenant."""
    try:
        data = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: {in_one_line(error)}") from None  # its excerpt may hold a key
    try:
        return KeyFile.model_validate(data)
    except ValidationError as error:
        location = error.errors()[0]["loc"]
        known = TenantEntry.model_fields if len(location) > 1 else KeyFile.model_fields
        problem = first_problem(error, "the file", known, noun="key")
        raise ConfigError(f"{where}: {problem}{_named(data, location)}") from None


def _named(data: Any, location: tuple[int | str, ...]) -> str:
    """Which tenant is meant, as far as it has a name."""
    try:
        return f" (tenant {data['tenants'][location[1]]['name']})"
    except (IndexError, KeyError, TypeError):
        return ""


def file_text(tenants: Iterable[TenantEntry]) -> str:
    """The content of a file with these tenants."""
    entries = [one.model_dump(exclude_defaults=True) for one in tenants]
    return str(yaml.safe_dump({"tenants": entries}, sort_keys=False))


def key_hash(key: str) -> str:
    """What the file holds of a key."""
    return hashlib.sha256(key.encode()).hexdigest()
