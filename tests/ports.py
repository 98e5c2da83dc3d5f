"""Which TCP ports of a process's children other machines can reach."""

from ipaddress import ip_address

import psutil


def open_ports(pid: int) -> dict[int, str]:
    """Those at which its descendants listen for other machines, each with its process's title."""
    return {
        socket.laddr.port: " ".join(one.cmdline()).strip()
        for one in psutil.Process(pid).children(recursive=True)
        for socket in one.net_connections("tcp")
        if socket.status == psutil.CONN_LISTEN and not ip_address(socket.laddr.ip.removeprefix("::ffff:")).is_loopback
    }
