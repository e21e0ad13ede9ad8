"""
Generation with a DSpark drafter, as `custom_generate/generate.py` of a drafter's repository.

`target.generate(**inputs, custom_generate="org/drafter", trust_remote_code=True, assistant_model=drafter)` finds it
there. The loop itself comes with the package; the drafter's own code needs only Transformers.
"""

from typing import Any


def generate(model: Any, assistant_model: Any = None, drafter: Any = None, **kwargs: Any) -> Any:
    """
    What `model.generate(..., assistant_model=drafter)` returns with the package installed.

    Args:
        model (`PreTrainedModel`): The target.
        assistant_model, drafter (`DSparkDrafter`): The drafter, by either name.
        kwargs: All other arguments of `generate`.

    Raises:
        ImportError: the package is not installed.
        ValueError: no drafter.
    """
    try:
        import transformers_dspark  # noqa: F401 (teaches `generate` what to do with a drafter)
    except ImportError as error:
        raise ImportError(
            "Generating with a DSpark drafter needs a package: run `pip install transformers-dspark`."
        ) from error
    drafter = drafter if assistant_model is None else assistant_model
    if drafter is None:
        raise ValueError("No drafter: give the one of this repository as assistant_model=.")
    return model.generate(assistant_model=drafter, **kwargs)
