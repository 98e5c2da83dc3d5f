"""Requests over time: public traces and synthetic loads.

May import kvrelay.
"""
