"""Memory that other processes read: the protocol of the cluster's store and of blocks borrowed from other workers.

May import kvrelay, kvtransfer/mover, kvtransfer/paths, kvtransfer/protocol, kvtransfer/transports.
"""
