"""The CPU backend: compiled kernels, and torch where there is no compiler.

May import kvrelay, kernels, kernels/common, kernels/oracle.
"""
