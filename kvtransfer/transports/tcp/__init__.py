"""The stream protocol over sockets: several connections between a reader and a source.

May import kvrelay, kvtransfer/mover, kvtransfer/transports.
"""
