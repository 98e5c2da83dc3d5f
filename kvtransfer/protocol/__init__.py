"""Messages, tickets and counters that source and target agree on.

May import kvrelay, kvtransfer/transports.
"""
