"""The tier controller: which blocks move between pool, host memory, disk and remote stores, and when.

May import kvrelay, kvcache/eviction, kvcache/index, kvcache/memory, kvcache/pool, kvcache/stores.
"""
