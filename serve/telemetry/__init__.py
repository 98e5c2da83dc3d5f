"""What the ingress reports: metrics, live view, request log, spans, explanations.

May import kvrelay, router, serve/api, serve/workers.
"""
