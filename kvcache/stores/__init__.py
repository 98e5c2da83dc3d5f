"""Stores of blocks below host memory: the interface, Redis and fsspec, codecs, namespaces, placement.

May import kvrelay.
"""
