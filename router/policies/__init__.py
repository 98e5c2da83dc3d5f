"""Routing policies, one class each.

May import kvrelay, router/decision.
"""
