"""Stores of blocks below host memory: the interface, Redis and fsspec, codecs, sealing, namespaces, placement.

May import kvrelay.
"""
