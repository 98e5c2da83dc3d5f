"""The ingress's links to the workers: membership, pairing, queries.

May import kvrelay, router, serve/requests, serve/telemetry.
"""
