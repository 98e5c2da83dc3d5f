"""The HTTP endpoints: schemas, streaming, errors, the page at /ui.

May import kvrelay, serve/requests, serve/telemetry, serve/text, serve/workers.
"""
