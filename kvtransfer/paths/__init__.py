"""Which transports connect a pair of workers, in what order they are tried, and how fast they are.

May import kvrelay, kvtransfer/mover, kvtransfer/protocol, kvtransfer/transports,
kvtransfer/transports/nixl, kvtransfer/transports/tcp.
"""
