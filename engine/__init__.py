"""Models, weights, runner, sampler and step scheduler of one worker.

May import kvrelay, kernels, kvcache.
"""
