"""The HTTP endpoints: schemas, request parameters, streaming, errors, the page at /ui.

May import kvrelay, router, serve/bodies, serve/chat, serve/requests, serve/telemetry, serve/text, serve/workers.
"""
