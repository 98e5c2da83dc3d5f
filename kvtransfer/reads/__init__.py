"""One read: where its bytes land, how they are verified and converted, and over which path they come.

May import kvrelay, kvtransfer/mover, kvtransfer/paths, kvtransfer/plans, kvtransfer/protocol, kvtransfer/transports.
"""
