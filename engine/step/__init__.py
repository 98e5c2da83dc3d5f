"""One engine: how it is built, its requests, its step (schedule, run, sample, emit), and what it reports of itself.

May import kvrelay, engine/checkpoints, engine/execution, engine/models, engine/scheduling,
engine/speculation, kernels, kvcache.
"""
