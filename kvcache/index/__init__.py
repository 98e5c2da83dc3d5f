"""What a tier below the pool holds, by prefix hash, and the change log that every index keeps.

May import kvrelay, kvcache/eviction.
"""
