"""`kvrelay keys`: adds API keys of tenants to a file, lists and removes them.

The key itself is printed once and kept nowhere: the file has its hash.
"""

import contextlib
import json
import os
import secrets
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from kvrelay.errors import ConfigError
from kvrelay.serve.tenants.access import read_keys
from kvrelay.serve.tenants.key_file import KeyFile, TenantEntry, file_text, key_hash, parse_keys

KEY_BYTES = 32
_QUOTAS = ("weight", "max_running", "tokens_per_minute", "pin_share", "store_bytes")


def command(
    action: Annotated[Literal["add", "list", "remove"], typer.Argument(help="what to do with the file")],
    name: Annotated[str | None, typer.Argument(help="the tenant; add and remove need it")] = None,
    *,
    file: Annotated[Path, typer.Option(help="the file that serve.api_keys_file names; add makes it")],
    shared: Annotated[
        bool, typer.Option("--shared", help="add: its KV is in the namespace of all shared tenants and serve.api_key")
    ] = False,
    weight: Annotated[float | None, typer.Option(help="add: its share of computing time, against 1")] = None,
    max_running: Annotated[int | None, typer.Option(help="add: most sequences that run at once")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(help="add: most tokens, of prompts and outputs")] = None,
    pin_share: Annotated[float | None, typer.Option(help="add: most of the KV pools that it pins, as a share")] = None,
    store_bytes: Annotated[str | None, typer.Option(help="add: most of the cluster's KV store, such as 4GiB")] = None,
) -> None:
    """API keys of tenants: add one and print it, list the tenants, or remove one. Ingresses read a changed file."""
    keys, console = read_keys(file) if action != "add" or file.exists() else KeyFile(), Console(highlight=False)
    if action == "list":
        console.print(_table(keys))
        return
    if name is None:
        raise ConfigError(f"{action} needs a tenant's name: kvrelay keys {action} NAME --file {file}")
    if action == "add":
        key = f"kvr-{secrets.token_urlsafe(KEY_BYTES)}"
        quotas = (weight, max_running, tokens_per_minute, pin_share, store_bytes)
        given = {what: value for what, value in zip(_QUOTAS, quotas, strict=True) if value is not None}
        _write(file, [*keys.tenants, _entry(name, key, shared=shared, **given)])
        console.out(key, highlight=False)
        Console(stderr=True).print(f"the key of {name}; it is not shown again", highlight=False, markup=False)
        return
    left = [one for one in keys.tenants if one.name != name]
    if len(left) == len(keys.tenants):
        raise ConfigError(f"{file} has no tenant {name!r}")
    _write(file, left)


def _entry(name: str, key: str, *, shared: bool, **quotas: Any) -> TenantEntry:
    """A checked entry. Raises ConfigError."""
    fields = {"name": name, "key_sha256": key_hash(key), "shared": shared, **quotas}
    (entry,) = parse_keys(json.dumps({"tenants": [fields]}), f"kvrelay keys add {name}").tenants  # JSON is YAML, too
    return entry


def _write(file: Path, tenants: list[TenantEntry]) -> None:
    """In one step, so that an ingress never reads half a file; for its owner alone. Raises ConfigError."""
    text = file_text(tenants)
    parse_keys(text, str(file))
    try:
        handle, written = tempfile.mkstemp(dir=file.absolute().parent, prefix=f".{file.name}-")  # mode 0600
        try:
            with os.fdopen(handle, "w") as target:
                target.write(text)
            os.replace(written, file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(written)
            raise
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error


def _table(keys: KeyFile) -> Table:
    table = Table("tenant", "namespace", "weight", "running", "tokens per minute", "pins", "store", box=None)
    for one in keys.tenants:
        values = ("-" if (value := getattr(one, what)) is None else f"{value:,}" for what in _QUOTAS)
        table.add_row(one.name, "shared" if one.shared else "its own", *values)
    return table
