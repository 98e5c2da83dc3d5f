"""Copy plans between two KV layouts, and where a read's bytes land: copied and hashed in one pass; verified; cast.

May import kvrelay.
"""
