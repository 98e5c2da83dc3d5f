"""Where a request stands in line: its priority, its deadline, and whom it is for. Not its `kv` hints, which say what is kept."""

from dataclasses import dataclass

from starlette.requests import Request

from kvrelay.hashing import tenant_of
from kvrelay.serve.api.http import bearer_token
from kvrelay.serve.api.schemas import Common
from kvrelay.settings.choices import TenantBy


@dataclass(frozen=True, slots=True)
class Standing:
    """As in wire.SequenceRequest. `deadline_s` counts from when the sequence is submitted."""

    priority: int = 0
    deadline_s: float | None = None
    tenant: str = ""


def standing_of(request: Request, body: Common, tenant_by: TenantBy) -> Standing:
    """What the body and, for the tenant, the bearer token say."""
    names = {"cache_salt": body.cache_salt or "", "user": body.user or "", "api_key": bearer_token(request)}
    name = next(filter(None, names.values()), "") if tenant_by == "auto" else names[tenant_by]
    return Standing(body.priority or 0, body.deadline_s, tenant_of(name))
