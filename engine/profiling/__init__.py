"""Profilers of an engine's steps: time by phase, and kernels apart from host work.

May import kvrelay, engine/step, kernels.
"""
