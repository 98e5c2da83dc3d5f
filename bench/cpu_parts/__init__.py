"""What bench/cpu.py is made of: the servers, the load, and what the figures must reach."""
