"""The planner: how many prefill and decode workers a load needs.

May import kvrelay.
"""
