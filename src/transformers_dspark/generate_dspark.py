"""
Generation with a DSpark drafter, as `custom_generate/generate.py` of a drafter's repository.

`target.generate(**inputs, custom_generate="org/drafter", trust_remote_code=True, assistant_model=drafter)` finds it
there. With the package installed its loops serve; without it, the files beside this one serve one prompt at a time.
"""

from __future__ import annotations

import copy
from typing import Any

from transformers import StoppingCriteriaList, StopStringCriteria


def generate(model: Any, assistant_model: Any = None, drafter: Any = None, **kwargs: Any) -> Any:
    """
    What `model.generate(..., assistant_model=drafter)` returns with the package installed.

    Args:
        model (`PreTrainedModel`): The target.
        assistant_model, drafter (`DSparkDrafter`): The drafter, by either name.
        kwargs: All other arguments of `generate`.

    Raises:
        NotImplementedError: a request that is not served, or not without the package.
        ValueError: no drafter.
    """
    drafter = drafter if assistant_model is None else assistant_model
    if drafter is None:
        raise ValueError("No drafter: give the one of this repository as assistant_model=.")
    try:
        import transformers_dspark  # noqa: F401 (teaches `generate` what to do with a drafter)
    except ImportError:
        return _without_the_package(model, drafter, **kwargs)
    return model.generate(assistant_model=drafter, **kwargs)


def _without_the_package(
    model: Any,
    drafter: Any,
    *,
    streamer: Any = None,
    tokenizer: Any = None,
    assistant_tokenizer: Any = None,
    **kwargs: Any,
) -> Any:
    """`generate` keeps `streamer` and `tokenizer` from a callable, so they reach it past `generate`."""
    from .assisted import assisted_decoding, check_request, check_tokenizers

    check_tokenizers(tokenizer, assistant_tokenizer)
    config = copy.copy(kwargs.get("generation_config"))
    stop_strings = kwargs.get("stop_strings") or getattr(config, "stop_strings", None)
    if tokenizer is not None and stop_strings:
        criterion = StopStringCriteria(tokenizer, stop_strings)
        kwargs["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or ()), criterion])
        kwargs.pop("stop_strings", None)
        if config is not None:
            config.stop_strings, kwargs["generation_config"] = None, config

    def decode(model: Any, input_ids: Any, generation_config: Any, **prepared: Any) -> Any:
        check_request(model, drafter, generation_config, generation_config.get_generation_mode())
        if len(input_ids) != 1:
            raise NotImplementedError(
                f"This call has {len(input_ids)} rows, and the code in a drafter's repository serves one: run "
                "`pip install transformers-dspark` for any number."
            )
        return assisted_decoding(
            model,
            input_ids,
            generation_config=generation_config,
            assistant_model=drafter,
            streamer=streamer,
            **prepared,
        )

    return model.generate(custom_generate=decode, streamer=streamer, **kwargs)
