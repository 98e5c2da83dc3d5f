"""Checkpoint folders: lookup, download, GGUF conversion, checks, and tiny ones for tests.

May import kvrelay, engine/models.
"""
