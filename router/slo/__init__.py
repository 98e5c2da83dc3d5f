"""Predicted TTFT and TPOT, and admission by service-level objectives.

May import kvrelay, router, router/fleet.
"""
