"""What a simulation is summed up to, as numbers, tables and plots.

May import kvrelay, cluster/simulator, cluster/simulator/resources.
"""
