"""The decode worker. Imports engine, kvtransfer, kvcache, kvrelay."""
