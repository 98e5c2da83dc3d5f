"""The prefix index over workers: which worker holds which block, fed by KV events.

May import kvrelay, router.
"""
