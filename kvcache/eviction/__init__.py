"""Eviction policies by name, and the frequency sketch of admission filters.

May import kvrelay.
"""
