"""`kvrelay bench`: a load generator for OpenAI servers.

May import kvrelay, cluster/launch, cluster/workloads.
"""
