"""Compiles the kernels of a worker ahead of their first use, with progress.

May import kvrelay, kernels.
"""
