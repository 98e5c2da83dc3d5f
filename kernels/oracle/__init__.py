"""The reference backend, float64 definitions of every kernel, and the grid that holds backends to them.

May import kvrelay, kernels, kernels/common.
"""
