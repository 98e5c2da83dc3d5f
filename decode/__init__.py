"""The decode worker: it reserves blocks, reads and verifies the prompt's KV, and generates tokens.

May import kvrelay, engine, kvtransfer.
"""
