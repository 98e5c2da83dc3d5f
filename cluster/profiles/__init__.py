"""Speed profiles of workers, measured or published.

May import kvrelay, engine, router.
"""
