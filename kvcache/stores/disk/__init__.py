"""The disk tier: blocks in a folder with a byte limit, found again after a restart.

May import kvrelay, kvcache/eviction, kvcache/index, kvcache/stores.
"""
