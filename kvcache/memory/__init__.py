"""The memory behind pool, host tier and swap area, and copies between them.

May import kvrelay, kvcache/tiers.
"""
