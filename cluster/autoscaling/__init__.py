"""Ray Serve's autoscaling policy: the planner's, with what it observes and remembers.

May import kvrelay, cluster/profiles, cluster/registry, router, serve.
"""
