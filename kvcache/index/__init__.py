"""What a tier below the pool holds, by prefix hash; pins, change logs and KV events, which the pool has, too.

May import kvrelay, kvcache/eviction.
"""
