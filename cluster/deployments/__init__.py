"""The Ray Serve application: deployments, registry, autoscaling, health.

May import kvrelay, cluster, cluster/profiles, cluster/store, decode, engine, kvcache, kvtransfer, prefill, router, serve.
"""
