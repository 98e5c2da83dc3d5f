"""What stands between an ingress's sockets and its API: limits of connections, heads and unfinished bodies.

May import kvrelay, serve/api, serve/requests.
"""
