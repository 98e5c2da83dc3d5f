"""A cluster in virtual time: production's router, scheduler, block pool and retry rules over simulated computing and copying.

May import kvrelay, cluster/autoscaling, cluster/profiles, cluster/simulator/reporting, cluster/simulator/resources, cluster/workloads, engine, kvcache, router, serve.
"""
