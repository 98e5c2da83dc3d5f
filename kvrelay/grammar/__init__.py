"""Structured output: grammars that an output's tokens must follow, the masks of allowed tokens, and the check of a
grammar at the ingress.

llguidance is imported where the first grammar needs it, so that a process without grammars pays nothing.
May import kvrelay, kvrelay/plane.
"""
