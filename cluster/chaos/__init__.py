"""`kvrelay chaos`: a cluster of its own under checked load, whose parts are killed, stopped and damaged.

May import kvrelay, cluster, cluster/chaos/hosts, cluster/launch, cluster/loadgen, engine.
"""
