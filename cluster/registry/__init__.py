"""Which workers and KV-store nodes are members of the cluster: heartbeats, retirements, and the Ray actor that keeps
them.

May import kvrelay, cluster, serve.
"""
