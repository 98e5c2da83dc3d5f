"""The two ends of a worker's KV plane, as its service sees them. Imports no transport: the ends bring those.

Every worker has both, whatever its role: the role decides which new requests it takes.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self

import msgspec

from kvrelay.engine.execution.launch import LayerHook
from kvrelay.engine.step.config import Reservation
from kvrelay.engine.step.engine import Engine
from kvrelay.engine.worker.build import WorkerOptions
from kvrelay.engine.worker.ingresses import IngressLink, RequestTable
from kvrelay.engine.worker.thread import EngineThread
from kvrelay.plane.messages import Pair, Prefill, Reserve, TokenOutput
from kvrelay.plane.reports import PairReport
from kvrelay.plane.tls import ClusterTls


class TransferCounters(Protocol):
    """What is used of kvtransfer's TransferStats, which this folder may not import."""

    def load_fields(self) -> dict[str, Any]:
        """LoadReport's fields about transfers."""

    def plus(self, other: Self) -> Self:
        """Both ends' counters as one."""


class KvPlane(Protocol):
    """One end of the KV plane: prefill's source, or decode's target."""

    @property
    def transports(self) -> list[str]:
        """On offer, best first."""

    @property
    def port(self) -> int:
        """Where prefill workers connect; 0: nowhere."""

    def pairs(self) -> list[PairReport]:
        """The workers that this one is connected to in this direction, and the paths to each."""

    def stats(self) -> Any:
        """Counters of its KV transfers, TransferCounters."""


class KvEnd(Protocol):
    """What both ends do. They live on the worker's loop."""

    @property
    def plane(self) -> KvPlane:
        """Its end of the KV plane."""

    def drop(self, request_id: str, reason: str) -> None:
        """The engine does not have this request: end what is held for it here. Idempotent."""

    def release(self, request_id: str, reason: str) -> None:
        """Free what the request holds here and in the engine, whatever its state."""

    async def aclose(self) -> None:
        """End every transfer."""


class SourceEnd(KvEnd, Protocol):
    """Computes prompts for others, and sends their KV."""

    def handle(self, link: IngressLink, message: Prefill | Pair) -> None:
        """A request to compute a prompt, or to connect to a decode worker."""

    def holds(self, request_id: str) -> bool:
        """Whether this request's KV is being sent from here. From any thread."""

    def on_output(self, output: TokenOutput) -> None:
        """An output of a request that it holds has been sent to its ingress."""


class TargetEnd(KvEnd, Protocol):
    """Receives KV, and decodes."""

    def handle(self, link: IngressLink, message: Reserve) -> None:
        """A request to decode what another worker computes."""

    def subscribed(self) -> None:
        """A subscriber was added, which knows nothing yet."""

    def changes(self) -> msgspec.Struct | None:
        """What subscribers receive with this heartbeat, besides the load."""

    def on_reservations(self, reservations: list[Reservation]) -> None:
        """The engine reserved blocks for these sequences."""


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What an end is made from, once the engine is built."""

    options: WorkerOptions
    epoch: str
    tls: ClusterTls | None
    engine: Engine
    thread: EngineThread
    requests: RequestTable


@dataclass(frozen=True, slots=True)
class EndStarters:
    """How a worker's ends are started; `layer_hook` is called when layers of held sequences are final."""

    source: Callable[[WorkerParts], Awaitable[SourceEnd]]
    target: Callable[[WorkerParts], Awaitable[TargetEnd]]
    layer_hook: LayerHook
