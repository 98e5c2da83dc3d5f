"""Checkpoint folders: found, converted from GGUF, checked, and made for tests.

May import kvrelay, engine/models.
"""
