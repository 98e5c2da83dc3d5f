"""A port is free again at once when its server has ended, and taken while anybody listens."""

import socket

from kvrelay.cluster.ray_session import free_port, why_not_free


def listener(port: int) -> socket.socket:
    """A server's socket as our ingress has Ray Serve make it."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("127.0.0.1", port))
    server.listen()
    return server


def test_a_listener_is_seen():
    port = free_port("127.0.0.1")
    with listener(port):
        assert why_not_free("127.0.0.1", port)


def test_a_server_that_ended_with_connections_open_leaves_its_port_free():
    port = free_port("127.0.0.1")
    server = listener(port)
    with socket.create_connection(("127.0.0.1", port)):
        accepted, _ = server.accept()
        accepted.close()  # the server closes first: its side waits in TIME_WAIT
        server.close()
    assert why_not_free("127.0.0.1", port) is None
    with listener(port):
        assert why_not_free("127.0.0.1", port)
