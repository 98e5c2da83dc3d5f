"""The cache controller: which blocks move between pool, host memory, disk and remote stores, and when.

May import kvrelay, kvcache/eviction, kvcache/pool, kvcache/stores.
"""
