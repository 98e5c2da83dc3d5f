"""Compiled helpers that several folders share: the loader that builds C sources once, block hashing, and the index of
block hashes.

May import kvrelay.
"""
