"""Copies and hashes scattered memory in one pass, in C where there is a compiler.

May import kvrelay, kvtransfer/plans, kvtransfer/transports.
"""
