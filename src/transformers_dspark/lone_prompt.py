"""One prompt without a word about loops: in captured rounds where that can be, else in the loop of Transformers."""

from __future__ import annotations

import threading
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput, logging

from ._compat import keeps_recurrent_state
from .assisted import assisted_decoding
from .captured import in_a_line, worth_a_try
from .decoding import Batch
from .mixers import mixers
from .modeling_dspark import DSparkDrafter


logger = logging.get_logger(__name__)


def captured_or_assisted(
    target: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: DSparkDrafter,
    streamer: BaseStreamer | None = None,
    **kwargs: Any,
) -> ModelOutput | torch.LongTensor:
    """
    Generates for one prompt, in whichever loop suits it. Both return the same kinds of things, and leave the keys and
    values of the text in the cache that was given. The loop is chosen before the first token is shown.

    Args:
        target, input_ids, logits_processor, stopping_criteria, generation_config, drafter, streamer, kwargs: As
            [`~decoding.batched_decoding`] takes them.

    Returns:
        The token ids, or a [`DSparkGenerateOutput`] with `return_dict_in_generate=True`.

    Raises:
        NotImplementedError, ValueError: neither loop serves the call, or inputs contradict each other.
    """
    call = target, input_ids, logits_processor, stopping_criteria, generation_config, drafter
    output = _captured((*call, kwargs), streamer)
    if output is None:
        output = assisted_decoding(*call, streamer=streamer, **kwargs)
    return output


def _captured(call: tuple[Any, ...], streamer: BaseStreamer | None) -> ModelOutput | torch.LongTensor | None:
    """Generates by a [`Batch`] of this call; `None` where something speaks against it, or fails before a token."""
    target, _, _, _, config, drafter, kwargs = call
    batch, given = None, kwargs.get("cache")
    try:
        if not _may_be_captured(target, drafter, config, kwargs):
            return None
        cache = DynamicCache(config=target.config) if given is None else given
        with torch.inference_mode(False):  # as for `batched_decoding`
            batch = Batch(*call)
            if batch.plays_graphs:
                return batch.decode(streamer, cache)
    except Exception as error:  # of models that the other loop may serve, and of memory that it may not need
        if batch is not None and batch.begun:
            raise
        logger.info(f"DSpark reads this prompt in the loop of Transformers: {in_a_line(error)}.")
    return None


def _may_be_captured(
    target: PreTrainedModel, drafter: DSparkDrafter, config: GenerationConfig, kwargs: dict[str, Any]
) -> bool:
    """
    As far as can be told without trying: a new cache of keys and values alone, which have no padding in front; room
    for it; and nobody else who needs the target while it attends in our way, so neither processes nor threads beside.
    """
    cache, mask = kwargs.get("cache"), kwargs.get("attention_mask")
    usual = config.cache_implementation is None and config.use_cache and not config.output_attentions
    new = cache is None or (type(cache) is DynamicCache and not cache.offloading and cache.get_seq_length() == 0)
    beside = threading.current_thread() is not threading.main_thread()
    if not (usual and new) or beside or kwargs.get("synced_gpus") or (target.tp_size or 1) > 1:
        return False
    if keeps_recurrent_state(target) or mixers(target) or (mask is not None and not bool(mask.all())):
        return False
    return worth_a_try(target, drafter, int(config.max_length))


__all__ = ["captured_or_assisted"]
