"""Routing: which workers serve a request, and how many workers a load needs.

`types` are the records that all rooms share. May import kvrelay.
"""
