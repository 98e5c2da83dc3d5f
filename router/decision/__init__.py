"""One routing decision: worker tables, cost, placement or refusal.

May import kvrelay, router/index, router/policies, router/slo.
"""
