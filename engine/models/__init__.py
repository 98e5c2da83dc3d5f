"""Decoder models: model specs as data, and the forward pass.

May import kvrelay, kernels.
"""
