"""One engine step: schedule, run, sample, emit; and what an engine reports of itself.

May import kvrelay, engine/checkpoints, engine/groups, engine/models, engine/scheduling, engine/speculation, engine/worker, kernels, kvcache.
"""
