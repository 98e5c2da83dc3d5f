"""Grafana dashboards, alert rules, Prometheus settings: the panels as data, files that ship, and what writes them.

May import kvrelay, cluster.
"""
