"""Ways to read a source's pool, behind one interface; where a worker's memory and its network cards are.

May import kvrelay, kvtransfer/mover.
"""
