"""What both ends of a KV transfer share.

May import kvrelay.
"""
