"""The prefill worker: it computes prompts, samples the first token, and announces KV blocks to the decode worker that reads them.

May import kvrelay, engine/step, engine/worker, kvtransfer.
"""
