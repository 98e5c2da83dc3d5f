"""Hosts in network namespaces for `kvrelay chaos --hosts`: they, a cluster on them, and what harms hosts and links.

May import kvrelay, cluster, cluster/chaos, cluster/deployments, cluster/launch.
"""
