"""Tickets, leases and transports that move KV blocks. Imports kvrelay only."""
