"""The settings' sections: frozen models, one module for each part of the system.

`kvrelay/config.py` reads and checks them.

May import kvrelay, kvrelay/plane.
"""
