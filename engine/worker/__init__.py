"""What prefill and decode workers share: the engine's thread, the request-plane service, tiers and memory at start.

May import kvrelay, engine/checkpoints, engine/execution, engine/models, engine/scheduling, engine/speculation,
engine/step, kernels, kvcache.
"""
