"""Which tokens of which sequences are computed in the next step, and which sequence holds which blocks.

May import kvrelay, kvcache.
"""
