"""The request plane: framed, authenticated connections between processes, plain or under TLS, and the messages that
travel on them.

May import kvrelay, kvrelay/settings.
"""
