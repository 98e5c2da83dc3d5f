"""Tenants around the ingress: the command that makes API keys, and what keeps keys and quotas current at each ingress.

May import kvrelay, serve.
"""
