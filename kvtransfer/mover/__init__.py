"""Brings scattered memory here: copied and hashed in one pass, in C where there is a compiler; verified; cast.

May import kvrelay, kvtransfer/plans.
"""
