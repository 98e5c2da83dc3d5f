"""Which installations of kvrelay may form one cluster. Pure.

Every replica must be of the version that was deployed, so a host with another one is refused; deploying another version
replaces all replicas, a few at a time. The registry outlives deployments: it must speak the same protocol as they do,
which changes only with a release that says so.
"""

from dataclasses import dataclass

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


def refusal(name: str, own: Installed, deployed: str, deployed_from: str, registry: Installed) -> str | None:
    """Why a replica may not join; None: it may. deployed_from: the host on which version `deployed` was built."""
    if own.version == deployed:
        return protocol_refusal(own, registry)
    return (
        f"{name} has kvrelay {own.version} on host {own.host}, but kvrelay {deployed} was deployed from host "
        f"{deployed_from or registry.host}: install one version on every host, then deploy again"
    )


def protocol_refusal(own: Installed, registry: Installed) -> str | None:
    """Why this installation cannot use this registry; None: it can."""
    if own.protocol == registry.protocol:
        return None
    return (
        f"the cluster's registry is {registry}, and this is {own}: between these two, stop the application (serve "
        "shutdown) and restart Ray"
    )
