"""Which workers a request goes to, and how many workers there should be.

May import kvrelay.
"""
