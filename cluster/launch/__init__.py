"""Processes: a Ray of our own, local workers without Ray, signals, supervision.

May import kvrelay, cluster, cluster/autoscaling, cluster/compiling, cluster/deployments, cluster/registry,
cluster/store, decode, engine, kernels, kvcache, prefill, router, serve.
"""
