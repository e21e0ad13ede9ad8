"""Finds the package: as the kernel's build installed it, else as it lies beside these tests. Without a GPU the kernels
run in Triton's interpreter, which Triton chooses when it reads them."""

import importlib.util
import os
import sys
from pathlib import Path

import torch


sys.path.insert(0, str(Path(__file__).parent))
if importlib.util.find_spec("few_rows_linear") is None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "torch-ext"))
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
