"""Which API keys are valid at an ingress, and what comes with each: a namespace for KV, quotas, the operator's rights.

Two kinds of key: the operator's (`serve.api_key`), and those of tenants (`serve.api_keys_file`). Owns the file's
content in this process; its host calls `reload` from time to time.
"""

import hashlib
import hmac
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path

from kvrelay.errors import ConfigError, InvalidRequest
from kvrelay.hashing import NAMESPACE_END, root_hash, tenant_name
from kvrelay.serve.tenants.key_file import DEFAULT_TENANT, KeyFile, TenantEntry, key_hash, parse_keys
from kvrelay.serve.tenants.quotas import Meter, QuotaLedger, Report, TenantLimits

logger = logging.getLogger(__name__)
_PURPOSE = b"tenant"  # of the digests that the cluster's secret makes of keys


@dataclass(frozen=True, slots=True)
class Caller:
    """What comes with the API key of a request. `name`: "" where keys name no tenants."""

    name: str = ""
    namespace: str = ""  # secret; "": the shared one
    limits: TenantLimits = field(default_factory=TenantLimits)
    is_operator: bool = True

    def salt(self, cache_salt: str | None) -> str:
        """The salt of the request's block hashes and sessions. Raises InvalidRequest."""
        given = cache_salt or ""
        if NAMESPACE_END in given:
            raise InvalidRequest("cache_salt: must not hold the character NUL", "cache_salt")
        return f"{self.namespace}{NAMESPACE_END}{given}" if self.namespace else given


class Access:
    """The keys that are valid now. Without a key and a file every request is the operator's."""

    def __init__(
        self,
        api_key: str | None = None,
        file: str | None = None,
        secret: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """secret: the cluster's, the same at each ingress. Raises ConfigError: the file cannot be used."""
        assert secret or not file, "namespaces are made with the cluster's secret"
        self._api_key, self._path, self._secret, self._clock = api_key, Path(file) if file else None, secret, clock
        self._operator = Caller(DEFAULT_TENANT if file else "")
        self.ledger = QuotaLedger()
        self._stamp = _stamp(self._path)
        self._callers = {} if self._path is None else self._callers_of(read_keys(self._path))

    def caller(self, key: str) -> Caller:
        """What this key is for. Raises InvalidRequest (401): nothing."""
        if self._api_key is None and self._path is None:
            return self._operator
        if self._api_key is not None and hmac.compare_digest(key.encode(), self._api_key.encode()):
            return self._operator
        caller = self._callers.get(key_hash(key))
        if caller is None:
            raise InvalidRequest("missing or wrong API key", None, 401, "invalid_api_key")
        return caller

    def operator(self, key: str) -> Caller:
        """As `caller`, for what is the operator's alone. Raises InvalidRequest (403), too."""
        caller = self.caller(key)
        if not caller.is_operator:
            message = "this needs the operator's key, serve.api_key: it shows or changes what belongs to all tenants"
            raise InvalidRequest(message, None, 403, "operator_key_required")
        return caller

    def shows_tenants(self, key: str) -> bool:
        """Whether an answer to this key may name tenants, if only by digests."""
        try:
            return self.caller(key).is_operator
        except InvalidRequest:
            return False

    def meter(self, caller: Caller) -> Meter | None:
        """Counts a request against the caller's quotas; None: it has none that are counted here."""
        if caller.is_operator or not caller.limits.are_counted:
            return None
        return Meter(self.ledger, caller.name, caller.limits, self._clock)

    def counted(self) -> dict[str, TenantLimits]:
        """The quotas that ingresses count, by tenant."""
        return {one.name: one.limits for one in self._callers.values() if one.limits.are_counted}

    def store_quotas(self) -> dict[str, int]:
        """Most bytes in the cluster's store, of the tenants with a quota of it, by the digest that blocks carry."""
        quotas = ((one, one.limits.store_bytes) for one in self._callers.values())
        return {tenant_name(root_hash(one.salt(None))): most for one, most in quotas if most is not None}

    def heard(self, report: Report, answer: Report) -> None:
        """The other ingresses' answer to a report of `ledger`."""
        self.ledger.heard(report, answer, self.counted(), self._clock())

    def reload(self) -> None:
        """Read the file again if it has changed. One that is bad leaves the keys as they are, and a line in the log.

        Reads from disk: call it on a thread.
        """
        if self._path is None or (stamp := _stamp(self._path)) == self._stamp:
            return
        self._stamp = stamp
        try:
            callers = self._callers_of(read_keys(self._path))
        except ConfigError as error:
            logger.warning("the API keys stay as they were: %s", error)
            return
        logger.info("%s: %d API keys", self._path, len(callers))
        self._callers = callers

    def _callers_of(self, keys: KeyFile) -> dict[str, Caller]:
        return {one.key_sha256: self._caller_of(one) for one in keys.tenants}

    def _caller_of(self, entry: TenantEntry) -> Caller:
        namespace = ""
        if not entry.shared:
            message = _PURPOSE + bytes.fromhex(entry.key_sha256)
            namespace = hmac.new(self._secret, message, hashlib.sha256).hexdigest()
        limits = TenantLimits(**{one.name: getattr(entry, one.name) for one in fields(TenantLimits)})
        return Caller(entry.name, namespace, limits, is_operator=False)


def read_keys(path: Path) -> KeyFile:
    """Raises ConfigError."""
    try:
        return parse_keys(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _stamp(path: Path | None) -> tuple[int, int, int] | None:
    """Differs after each change; None: there is no such file."""
    try:
        found = path.stat() if path is not None else None
    except OSError:
        return None
    return None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)
