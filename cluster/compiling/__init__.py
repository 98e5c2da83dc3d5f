"""Compiles a worker's kernels ahead of their first use, with progress. May import kvrelay, engine, kernels, kvcache."""
