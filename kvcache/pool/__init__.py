"""The blocks of one worker: references, generations, the prefix index over them, pins, and KV events.

May import kvrelay, kvcache/eviction, kvcache/tiers.
"""
