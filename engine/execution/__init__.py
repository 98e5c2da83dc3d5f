"""Runs a planned step: loads, layer events, the model's batch, sampling, outputs, and the step in flight.

May import kvrelay, engine/models, engine/scheduling, kernels, kvcache.
"""
