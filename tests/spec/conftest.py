"""Lets tests of pure logic reach what the benches replay with. Appended, so that nothing of ours hides an installed package."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
