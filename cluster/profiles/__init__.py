"""Speed profiles of workers, measured or published, and flame graphs.

May import kvrelay, engine, router.
"""
