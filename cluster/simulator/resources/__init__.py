"""Virtual time, and what simulated processes share: networks and machines.

Imports nothing of ours.
"""
