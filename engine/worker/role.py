"""What a prefill or a decode worker adds to a WorkerService. Imports no transport: the roles add those."""

from typing import Any, Protocol

import msgspec

from kvrelay.engine.step.config import Reservation
from kvrelay.engine.worker.ingresses import IngressLink
from kvrelay.plane.messages import Pair, Prefill, Reserve, TokenOutput
from kvrelay.plane.reports import PairReport


class TransferCounters(Protocol):
    """What is used of kvtransfer's TransferStats, which this folder may not import."""

    def load_fields(self) -> dict[str, Any]:
        """LoadReport's fields about transfers."""


class KvPlane(Protocol):
    """One end of the KV plane: prefill's source, or decode's target."""

    @property
    def transports(self) -> list[str]:
        """On offer, best first."""

    @property
    def port(self) -> int:
        """Where prefill workers connect; 0: nowhere."""

    def pairs(self) -> list[PairReport]:
        """The workers of the other role that this one is connected to, and the paths to each."""

    def stats(self) -> TransferCounters:
        """Counters of its KV transfers."""


class WorkerRole(Protocol):
    """One role's end of the KV plane, and the requests that are for it alone. Lives on the worker's loop."""

    watches_outputs: bool  # whether on_output is called for every output, not only for the last ones

    @property
    def plane(self) -> KvPlane:
        """Its end of the KV plane."""

    def handle(self, link: IngressLink, message: Prefill | Reserve | Pair) -> None:
        """A message that is for one role only."""

    def drop(self, request_id: str, reason: str) -> None:
        """The engine does not have this request: end what the role holds for it."""

    def release(self, request_id: str, reason: str) -> None:
        """Free what the request holds here and in the engine, whatever its state."""

    def subscribed(self) -> None:
        """A subscriber was added, which knows nothing yet."""

    def changes(self) -> msgspec.Struct | None:
        """What subscribers receive with this heartbeat, besides the load."""

    def on_output(self, output: TokenOutput) -> None:
        """An output has been sent to its ingress."""

    def on_reservations(self, reservations: list[Reservation]) -> None:
        """The engine reserved blocks for these sequences."""

    async def aclose(self) -> None:
        """End every transfer."""
