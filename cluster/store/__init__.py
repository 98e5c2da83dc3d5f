"""The cluster's own KV store: nodes, replicas, repair, and its clients.

May import kvrelay, cluster/registry, engine, kvcache, kvtransfer.
"""
