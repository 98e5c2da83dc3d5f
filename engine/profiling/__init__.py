"""Where the time of an engine's steps goes.

May import kvrelay, engine/step, kernels.
"""
