"""Routing policies, one class each, and the cost model.

May import kvrelay, router.
"""
