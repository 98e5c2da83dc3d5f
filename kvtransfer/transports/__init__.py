"""Ways to read a source's pool, behind one interface.

May import kvrelay, kvtransfer/mover, kvtransfer/plans, kvtransfer/reads.
"""
