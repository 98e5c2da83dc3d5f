"""Where blocks lie below host memory: the interface of a store, remote stores, codecs and formats.

May import kvrelay, kvcache/memory, kvcache/tiers.
"""
