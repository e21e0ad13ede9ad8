"""Finds the package: as the kernel's build installed it, else as it lies beside these tests."""

import importlib.util
import sys
from pathlib import Path


if importlib.util.find_spec("ragged_attention") is None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "torch-ext"))
