"""One request at the ingress: attempts, retries, token order, sampling.

May import kvrelay, router, serve/api, serve/telemetry, serve/text, serve/workers.
"""
