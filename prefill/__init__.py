"""The prefill worker. Imports engine, kvtransfer, kvcache, kvrelay."""
