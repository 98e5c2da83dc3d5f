"""Checkpoint folders: lookup, download, GGUF conversion, checks, tiny ones for tests, and models loaded from them.

May import kvrelay, engine/models, kernels.
"""
