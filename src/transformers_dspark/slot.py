"""Which loop serves a DSpark drafter in `generate`, and the callable for `custom_generate`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.utils import ModelOutput

from ._compat import keeps_recurrent_state
from .assisted import assisted_decoding, check_request
from .cache import RaggedCache
from .compressed import compressing
from .configuration_dspark import DSparkConfig
from .decoding import batched_decoding
from .divergence import check_greedy
from .generation_config import DraftingOptions
from .lone_prompt import captured_or_assisted
from .modeling_dspark import DSparkDrafter
from .strict import check_strict


def decoding(
    target: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    assistant_model: DSparkDrafter,
    **kwargs: Any,
) -> ModelOutput | torch.LongTensor:
    """
    Runs a DSpark drafter in Transformers' assisted loop, or in the batched one, as the call's options say.

    Args:
        assistant_model (`DSparkDrafter`): The drafter.
        target, kwargs: As the method `_compat.ASSISTED_LOOP` takes them, and all the others.

    Returns:
        The token ids, or a [`DSparkGenerateOutput`] with `return_dict_in_generate=True`.

    Raises:
        NotImplementedError: a cache that cannot be rolled back, or a legal request that the loop does not serve.
        ValueError: several prompts for the assisted loop, or inputs that contradict each other.
    """
    options = DraftingOptions.resolve(generation_config, assistant_model)
    if options.report_divergence and (generation_config.do_sample or not generation_config.return_dict_in_generate):
        raise ValueError(
            "report_divergence=True compares greedy texts and puts its report into the output: it needs "
            "do_sample=False and return_dict_in_generate=True."
        )
    cache = kwargs.get("cache")
    ours = (
        len(input_ids) != 1
        or options.step_cost_table is not None
        or options.round_callback is not None
        or options.use_cuda_graphs is True
        or options.strict_greedy
        or isinstance(cache, RaggedCache)
        or (keeps_recurrent_state(target) and not compressing(target))
    )
    batched = options.loop == "batched" or (options.loop == "auto" and ours)
    if batched and kwargs.pop("synced_gpus", False):
        raise NotImplementedError(
            "The batched loop does not keep several processes in step (synced_gpus): generate for one prompt at a "
            "time with dspark_loop='transformers', or without the drafter."
        )
    if options.round_callback is not None and not batched:
        raise ValueError(
            "round_callback is called by the batched loop alone, and dspark_loop='transformers' was asked for: use "
            "'auto' or 'batched'."
        )
    if options.use_cuda_graphs is True and not batched:
        raise ValueError(
            "use_cuda_graphs=True is for the batched loop, and dspark_loop='transformers' was asked for: use 'auto' "
            "or 'batched'."
        )
    if options.use_cuda_graphs is True and isinstance(cache, RaggedCache):
        raise NotImplementedError(
            "use_cuda_graphs=True: captured rounds cannot go on from the cache of an earlier call. Leave it at "
            "'auto', or leave the cache out."
        )
    if options.strict_greedy:
        check_strict(target, generation_config, batched)
    alone = captured_or_assisted if options.loop == "auto" else assisted_decoding
    loop: Callable[..., Any] = batched_decoding if batched else alone
    fresh = copy.deepcopy(logits_processor) if options.report_divergence else None  # before the loop moves their state
    output: Any = loop(
        target, input_ids, logits_processor, stopping_criteria, generation_config, assistant_model, **kwargs
    )
    if fresh is not None:
        counts = [1 + sum(row) for row in output.dspark.accepted_lengths] or [1] * len(input_ids)
        mask = kwargs.get("attention_mask")
        output.divergence = check_greedy(target, input_ids, output.sequences, counts, mask, fresh)
    return output


def generate(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: DSparkDrafter | None = None,
    **model_kwargs: Any,
) -> ModelOutput | torch.LongTensor:
    r"""
    Decoding method for `custom_generate`, the public door of `generate`. Any batch size.

    ```python
    >>> target.generate(**inputs, custom_generate=transformers_dspark.generate, drafter=drafter, max_new_tokens=256)
    ```

    `generate` hands a callable neither `streamer` nor `tokenizer`: for those, and so for `stop_strings`, use
    `assistant_model=drafter` (or pass a `StopStringCriteria` among `stopping_criteria`).

    Args:
        model (`PreTrainedModel`): The target.
        drafter (`DSparkDrafter`): The drafter.
        input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs: As `generate` prepares them.

    Returns:
        The token ids, or a [`DSparkGenerateOutput`] with `return_dict_in_generate=True`.

    Raises:
        NotImplementedError: a legal request that this version does not support.
        ValueError: `drafter` is none, or does not fit the target, or options contradict each other.
    """
    if drafter is None:
        raise ValueError(
            "No drafter was given: name it `drafter=`, since `generate` keeps `assistant_model` from this door."
        )
    if getattr(getattr(drafter, "config", None), "model_type", None) != DSparkConfig.model_type:
        raise ValueError(f"drafter is a {type(drafter).__name__}; it must be a DSparkDrafter for this target.")
    check_request(model, drafter, generation_config, generation_config.get_generation_mode())
    return decoding(
        model,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        drafter,
        **model_kwargs,
    )


__all__ = ["decoding", "generate"]
