"""A cluster in virtual time: production's router, scheduler, block pool and retries over simulated steps and transfers.

May import kvrelay, cluster/autoscaling, cluster/profiles, cluster/workloads, engine, kvcache, router, serve.
"""
