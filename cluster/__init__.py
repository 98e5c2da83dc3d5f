"""Ray actors, the Serve application, the command line and everything that is run around them.

May import kvrelay, decode, engine, kernels, kvcache, kvtransfer, prefill, router, serve.
"""
