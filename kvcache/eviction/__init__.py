"""Eviction policies by name, and the admission filter of the disk tier.

May import kvrelay.
"""
