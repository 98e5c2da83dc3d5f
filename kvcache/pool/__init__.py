"""The blocks of one worker: references, generations, the prefix index over them, and pins.

May import kvrelay, kvcache/eviction, kvcache/index.
"""
