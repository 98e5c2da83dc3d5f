"""Results of a simulation as numbers, tables and plots.

May import kvrelay, cluster/simulator, cluster/simulator/resources.
"""
