"""Speculative decoding: drafts by prompt lookup or by a draft model, verified in the same step.

May import kvrelay, engine/checkpoints, engine/execution, engine/models, engine/scheduling, kernels, kvcache.
"""
