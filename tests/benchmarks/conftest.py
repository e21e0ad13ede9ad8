"""The benchmarks are a folder of the checkout and no part of the package: here they are found."""

import sys
from pathlib import Path


ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)
