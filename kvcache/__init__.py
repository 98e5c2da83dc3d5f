"""The KV cache of one worker: blocks, prefix index, eviction, tiers and stores.

May import kvrelay.
"""
