"""The memory behind the pool, the host tier and the swap area; the threads that copy between them; KV import and
export.

May import kvrelay.
"""
