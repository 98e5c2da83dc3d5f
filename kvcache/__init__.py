"""The KV cache's bookkeeping and memory. Imports kvrelay only."""
