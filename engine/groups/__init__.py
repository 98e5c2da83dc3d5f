"""Several sequences of one request: n, best_of and beam search over shared prompt blocks.

May import kvrelay, engine/scheduling, kvcache.
"""
