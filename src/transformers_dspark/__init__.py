"""
DSpark speculative decoding for Hugging Face Transformers.

Importing this package registers the drafter with Transformers, see [`register`]. The other names below are imported on
first use, so that `import transformers_dspark` costs little more than `import transformers` and loads neither PyTorch
nor Triton.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .integration import register, unregister


__version__ = "0.1.0"

# public name -> the module that defines it
_EXPORTS = {
    "ConfidenceCalibration": "calibration",
    "DSparkCandidateGenerator": "candidates",
    "DSparkConfig": "configuration_dspark",
    "DSparkDrafter": "modeling_dspark",
    "DSparkGenerateOutput": "telemetry",
    "DSparkGenerationConfig": "generation_config",
    "GenerationStats": "telemetry",
    "OnlineCalibration": "recalibration",
    "RoundRecord": "telemetry",
    "RoundStatistics": "round_statistics",
    "StepCostTable": "step_costs",
    "generate": "slot",
}

__all__ = [
    "ConfidenceCalibration",
    "DSparkCandidateGenerator",
    "DSparkConfig",
    "DSparkDrafter",
    "DSparkGenerateOutput",
    "DSparkGenerationConfig",
    "GenerationStats",
    "OnlineCalibration",
    "RoundRecord",
    "RoundStatistics",
    "StepCostTable",
    "__version__",
    "generate",
    "register",
    "unregister",
]

if TYPE_CHECKING:
    from .calibration import ConfidenceCalibration
    from .candidates import DSparkCandidateGenerator
    from .configuration_dspark import DSparkConfig
    from .generation_config import DSparkGenerationConfig
    from .modeling_dspark import DSparkDrafter
    from .recalibration import OnlineCalibration
    from .round_statistics import RoundStatistics
    from .slot import generate
    from .step_costs import StepCostTable
    from .telemetry import DSparkGenerateOutput, GenerationStats, RoundRecord


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})


register()
