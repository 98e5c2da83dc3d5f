"""The prefill worker: it computes prompts, samples the first token, and announces KV blocks to the decode worker.

May import kvrelay, engine, kvtransfer.
"""
