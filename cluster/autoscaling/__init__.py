"""Ray Serve autoscaling policies: the planner's, with what it observes and remembers, and a policy by utilisation.

May import kvrelay, cluster/profiles, cluster/registry, router, serve.
"""
