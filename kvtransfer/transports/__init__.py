"""Ways to read a source's pool, one module each, behind base.py. Imports kvrelay and kvtransfer.plans only."""
