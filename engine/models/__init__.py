"""Decoder models: what a family is made of, as data, its weights, and one forward pass.

May import kvrelay, engine/checkpoints, kernels.
"""
