"""The Ray Serve application: its deployments, their CPU cores and health, and its Serve configuration.

May import kvrelay, cluster, cluster/autoscaling, cluster/compiling, cluster/registry, cluster/store, cluster/tenants,
decode, engine, kvcache, kvtransfer, prefill, router, serve.
"""
