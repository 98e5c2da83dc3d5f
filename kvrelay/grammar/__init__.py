"""Structured output: grammars that an output's tokens must follow, the masks of allowed tokens, and the check of a
grammar at the ingress.

llguidance and xgrammar are imported where a grammar first needs them, so that a process without grammars pays nothing.
May import kvrelay, kvrelay/plane.
"""
