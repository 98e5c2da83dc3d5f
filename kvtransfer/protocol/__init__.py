"""Messages, tickets, counters and checksums that source and target agree on.

May import kvrelay, kvtransfer/mover, kvtransfer/paths, kvtransfer/plans.
"""
