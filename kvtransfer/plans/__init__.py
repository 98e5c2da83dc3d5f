"""From two KV layouts and two block lists to a short list of contiguous copies.

May import kvrelay.
"""
