"""Which installations of kvrelay may form one application. Pure.

Every replica must be of the version that was deployed, so a host with another one is refused; deploying another version
replaces all replicas, a few at a time, and meanwhile both versions work together: what decides is the protocol, and
for KV the fingerprint, which change only with a release that says so. The registry outlives deployments, so it must
speak their protocol; one that does not needs another application beside it, which has a registry of its own.
"""

from dataclasses import dataclass
from typing import TypedDict

from kvrelay import __version__
from kvrelay.plane.messages import PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Installed:
    """kvrelay on one host, by its address."""

    host: str
    version: str = __version__
    protocol: int = PROTOCOL_VERSION

    def __str__(self) -> str:
        return f"kvrelay {self.version} (protocol {self.protocol}) on host {self.host}"


class Deployed(TypedDict):
    """What replicas learn from the process that built the application: plain data, which any version can read."""

    version: str
    host: str  # on which it was built
    secret: str | None  # of the registry that the first replica starts; None: a random one
    api_key: str | None  # as `secret`, for ingresses whose settings have none


def refusal(name: str, own: Installed, deployed: Deployed, registry: Installed) -> str | None:
    """Why a replica may not join; None: it may."""
    if own.version == deployed["version"]:
        return protocol_refusal(own, registry)
    return (
        f"{name} has kvrelay {own.version} on host {own.host}, but kvrelay {deployed['version']} was deployed from "
        f"host {deployed['host']}: install one version on every host, then deploy again"
    )


def protocol_refusal(own: Installed, registry: Installed) -> str | None:
    """Why this installation cannot use this registry; None: it can."""
    if own.protocol == registry.protocol:
        return None
    return (
        f"the application's registry is {registry}, and this is {own}: deploy it as an application of another name, "
        "which takes over (kvrelay deploy)"
    )
