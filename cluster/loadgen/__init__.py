"""`kvrelay bench`: a load generator for OpenAI servers.

May import kvrelay, cluster, cluster/launch, cluster/workloads.
"""
