"""One request at the ingress: placed, reserved, prefilled, committed, decoded, and retried after a failure.

May import kvrelay, router, serve/chat, serve/telemetry, serve/tenants, serve/text, serve/workers.
"""
