"""What happens to a simulated cluster while it runs: faults, starts and retirements of workers, the planner.

May import kvrelay, cluster/autoscaling, cluster/profiles, cluster/simulator, router.
"""
