"""The sections of bench/gpu.py: each runs alone in a child process and writes its rows as it gets them."""
