"""`kvrelay verify`: every way of serving compared with Hugging Face, row by row.

May import kvrelay, cluster/launch, decode, engine, kernels, kvcache, kvtransfer, serve.
"""
