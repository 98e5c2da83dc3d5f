"""Tenants of one cluster: their API keys, the namespace of each one's KV, and its quotas over all ingresses.

May import kvrelay.
"""
