"""The HTTP endpoints: schemas, request parameters, streaming, errors, the page at /ui.

May import kvrelay, router, serve/bodies, serve/chat, serve/requests, serve/telemetry, serve/tenants, serve/text,
serve/workers.
"""
