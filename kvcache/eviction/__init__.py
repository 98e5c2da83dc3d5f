"""Which cached block is reused first: policies by name.

May import kvrelay.
"""
