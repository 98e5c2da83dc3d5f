"""Compiled helpers of several folders: the loader that builds C sources once, block hashing, and the hash index.

May import kvrelay.
"""
