"""What the router knows of live workers: accounts of their load, columns over all of them, incompatible pairs.

May import kvrelay, router, router/policies.
"""
