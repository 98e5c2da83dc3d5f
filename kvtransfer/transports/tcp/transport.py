"""TCP: the transport between hosts, and on one host where no memory can be shared."""

from functools import partial

from kvrelay.kvtransfer.transports.base import Transport
from kvrelay.kvtransfer.transports.tcp.exporter import TcpExporter
from kvrelay.kvtransfer.transports.tcp.reader import TcpReader
from kvrelay.plane.tls import ClusterTls
from kvrelay.types import KvMemory


def _why_not(memory: KvMemory) -> str | None:
    return None if memory.view is not None else "the pool is not in host memory"


def tcp(num_streams: int = 0, tls: ClusterTls | None = None) -> Transport:
    """The transport with these many streams (0: as many as suit the pair), under `tls` if any."""
    return Transport(
        "tcp", partial(TcpExporter, tls=tls), partial(TcpReader, tls=tls, num_streams=num_streams), _why_not
    )


TCP = tcp()
