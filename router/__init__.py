"""Which workers a request goes to. Pure. Imports kvrelay only."""
