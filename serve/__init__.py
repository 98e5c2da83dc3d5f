"""The ingress: OpenAI HTTP, tokenising, and every request from its placement to its last token.

May import kvrelay, router.
"""
