"""OpenAI HTTP and the life of a request at the ingress.

May import kvrelay, router.
"""
