"""Decoder models: model specs as data, weights, and the forward pass.

May import kvrelay, engine/checkpoints, kernels.
"""
