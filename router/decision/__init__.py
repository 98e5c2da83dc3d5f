"""One routing decision: candidates, their cost, the choice, and the load that it adds.

May import kvrelay, router, router/fleet, router/index, router/policies, router/slo.
"""
