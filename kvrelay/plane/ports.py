"""The ports that this process listens on for other processes of the cluster: any free ones, or those of a range that a
firewall lets through.

The range belongs to the process, like its network: `use_ports` sets it before anything listens. Imports nothing of
ours.
"""

import errno
import os
import socket

_range = range(0)  # empty: any free port


def use_ports(ports: range) -> None:
    """Listen in this range from now on; empty: at any free port. Its users are `listen` and UCX under NIXL."""
    global _range
    _range = ports


def port_range() -> range:
    """The range in use; empty: any free port."""
    return _range


def listen(host: str, port: int = 0, *, backlog: int) -> socket.socket:
    """A socket that listens there; port 0: at a free port of the range. Raises OSError.

    Processes begin at different places of the range, so that they seldom meet.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if port or not _range:
        return socket.create_server(address[:2], family=family, backlog=backlog)
    begin = os.getpid() * 7 % len(_range)
    for one in (*_range[begin:], *_range[:begin]):
        try:
            return socket.create_server((address[0], one), family=family, backlog=backlog)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(
        errno.EADDRINUSE,
        f"every port of cluster.worker_ports, {_range.start}-{_range.stop - 1}, is taken at {host}: widen the range",
    )
