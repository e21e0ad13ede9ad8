"""One prompt without a word about loops: in captured rounds where that can be, else in the loop of Transformers."""

from __future__ import annotations

import threading
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
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
    *call: Any, streamer: BaseStreamer | None = None, **kwargs: Any
) -> ModelOutput | torch.LongTensor:
    """
    Generates for one prompt, in whichever loop suits it. Both return the same kinds of things, and leave the keys and
    values of the text in the cache that was given. The loop is chosen before the first token is shown.

    Args:
        call, streamer, kwargs: As [`~decoding.batched_decoding`] takes them, from the target to the drafter in order.

    Returns:
        The token ids, or a [`DSparkGenerateOutput`] with `return_dict_in_generate=True`.

    Raises:
        NotImplementedError, ValueError: neither loop serves the call, or inputs contradict each other.
    """
    output = _captured((*call, kwargs), streamer)
    if output is None:
        output = assisted_decoding(*call, streamer=streamer, **kwargs)
    return output


def _captured(call: tuple[Any, ...], streamer: BaseStreamer | None) -> ModelOutput | torch.LongTensor | None:
    """Generates by a [`Batch`] of this call; `None` where something speaks against it, or fails before a token."""
    target, _, _, _, config, drafter, kwargs = call
    batch, given = None, kwargs.get("cache")
    try:
        reason = _reason_against(target, drafter, config, kwargs)
        if reason is None:
            cache = DynamicCache(config=target.config) if given is None else given
            with torch.inference_mode(False):  # as for `batched_decoding`
                batch = Batch(*call)
                if batch.plays_graphs:
                    return batch.decode(streamer, cache)
            reason = "its rounds cannot be captured"
    except Exception as error:  # of models that the other loop may serve, and of memory that it may not need
        if batch is not None and batch.begun:
            raise
        reason = in_a_line(error)
    logger.info(f"DSpark takes the loop of Transformers for this prompt: {reason}.")
    return None


def _reason_against(
    target: PreTrainedModel, drafter: DSparkDrafter, config: GenerationConfig, kwargs: dict[str, Any]
) -> str | None:
    """
    As far as can be told without trying: there has to be a new cache of keys and values alone, without padding in
    front, room for it, and nobody else who needs the target while it attends in our way.
    """
    if not worth_a_try(target, drafter, int(config.max_length)):
        return "this device plays no graphs, or its memory is short"
    cache, mask = kwargs.get("cache"), kwargs.get("attention_mask")
    new = cache is None or (type(cache) is DynamicCache and not cache.offloading and cache.get_seq_length() == 0)
    reasons = {
        "other threads may run the target": threading.current_thread() is not threading.main_thread(),
        "several processes run the target": bool(kwargs.get("synced_gpus")) or (target.tp_size or 1) > 1,
        "its cache is not a new DynamicCache": not (new and config.use_cache)
        or config.cache_implementation is not None,
        "attentions are to be returned": config.output_attentions,
        "it is padded": mask is not None and not bool(mask.all()),
        "the target keeps more than keys and values": keeps_recurrent_state(target) or bool(mixers(target)),
    }
    return next((reason for reason, met in reasons.items() if met), None)


__all__ = ["captured_or_assisted"]
