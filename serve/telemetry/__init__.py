"""What the ingress reports: counters, metrics, request log, spans, explanations, the live view.

May import kvrelay, router, serve/workers.
"""
