"""A DSpark drafter in Transformers' own assisted loop, for one prompt: checks before any work, and what the loop needs
while it runs.

The loop's code is Transformers'. It gets our candidate generator, our rule of acceptance and a view of the target; it
is neither copied nor patched, see `_compat.rebind`. Everything here lives for one call.

This file and those that it imports are also copied into the repositories of drafters, see `packaging`, where nothing
else of the package can be imported.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin, StaticLayer
from transformers.generation import GenerationMode
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.utils import ModelOutput

from ._compat import (
    ACCEPT,
    ASSISTED_LOOP,
    CANDIDATE_GENERATOR,
    MASK_LENGTH,
    SPLIT_OUTPUTS,
    keeps_recurrent_state,
    learns_prompt,
    rebind,
)
from .candidates import DSparkCandidateGenerator
from .generation_config import DraftingOptions, eos_ids
from .processors import SpeculativeProcessors, SpeculativeStopping
from .rewinding import compresses, rewinding
from .sampling import accept, accept_greedy
from .target import few_rows_linears
from .telemetry import DSparkGenerateOutput, GenerationStats


def check_request(target: PreTrainedModel, drafter: Any, config: GenerationConfig, mode: GenerationMode) -> None:
    """
    Refuses what cannot be served, before any work.

    Raises:
        NotImplementedError: a legal request that this version does not support.
        ValueError: the drafter does not fit the target, or options contradict each other.
    """
    name = type(target).__name__
    if learns_prompt(target):
        raise NotImplementedError(
            "This adapter puts a learned prompt or prefix before the text, of which a DSpark drafter knows nothing: "
            "generate without the drafter."
        )
    if mode not in (GenerationMode.ASSISTED_GENERATION, GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise NotImplementedError(
            f"A DSpark drafter works with greedy decoding and sampling; this call asks for {mode.value}. Set "
            "num_beams=1 and leave the options of other search methods unset, or drop the drafter."
        )
    if target.config.is_encoder_decoder:
        raise NotImplementedError(f"{name} is an encoder-decoder model; DSpark drafts for decoder-only targets.")
    if config.cache_implementation == "quantized":
        raise NotImplementedError(
            "cache_implementation='quantized' cannot be rolled back after a rejected draft: use 'dynamic' or 'static'."
        )
    if config.use_cache is False:
        raise ValueError(
            "use_cache=False contradicts speculative decoding, which verifies drafts against a cache: leave it unset."
        )
    others = (
        "assistant_ensemble_weight",
        "assistant_early_exit",
        "prompt_lookup_num_tokens",
        "dola_layers",
        "use_mtp",
        "speculation_type",
    )
    if given := [option for option in others if getattr(config, option, None)]:
        raise ValueError(
            f"{', '.join(given)} cannot be combined with a DSpark drafter: leave it unset, or drop the drafter."
        )
    drafter.check_target(target)
    DraftingOptions.resolve(config, drafter)


def check_tokenizers(tokenizer: Any, assistant_tokenizer: Any) -> None:
    """
    Refuses an assistant's tokenizer that is not the target's own. (A pipeline passes the target's once more when the
    drafter's configuration names other special tokens.)

    Raises:
        ValueError: it is another, or the target's was not given.
    """
    if assistant_tokenizer is None or assistant_tokenizer is tokenizer:
        return
    if tokenizer is None or tokenizer.get_vocab() != assistant_tokenizer.get_vocab():
        raise ValueError(
            "assistant_tokenizer is not used: a DSpark drafter writes in its target's own vocabulary. Leave it out."
        )


def assisted_decoding(
    target: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    assistant_model: Any,
    assistant_tokenizer: Any = None,
    **kwargs: Any,
) -> ModelOutput | torch.LongTensor:
    """
    Runs a DSpark drafter in Transformers' assisted loop.

    Args:
        assistant_model (`DSparkDrafter`): The drafter.
        assistant_tokenizer: Already judged by [`check_tokenizers`].
        target, kwargs: As the method `_compat.ASSISTED_LOOP` takes them, and all the others.

    Returns:
        The token ids, or a [`DSparkGenerateOutput`] with `return_dict_in_generate=True`.

    Raises:
        NotImplementedError: a cache that cannot be rolled back.
        ValueError: several prompts, an empty one, or inputs that contradict each other.
    """
    cache = kwargs.get("cache")
    if not input_ids.shape[1] and kwargs.get("inputs_embeds") is None:
        raise ValueError("The prompt is empty: give at least one token.")
    _check_call(target, input_ids, cache)
    processors = SpeculativeProcessors(logits_processor, eos_ids(generation_config))
    with_scores = bool(generation_config.return_dict_in_generate and generation_config.output_scores)
    stopping = SpeculativeStopping(stopping_criteria, with_scores)
    drafting = DSparkCandidateGenerator(assistant_model, target, generation_config, processors)
    rounds = _Rounds(drafting, processors, stopping, cache, bool(generation_config.do_sample))

    config = copy.copy(generation_config)
    config.do_sample = True  # greedy calls too: only this branch of the loop leaves the choice of tokens to us
    config.disable_compile = config.disable_compile or drafting.taps.needs_hook
    loop = getattr(type(target), ASSISTED_LOOP)
    bound = rebind(loop, **{ACCEPT: rounds.verify, SPLIT_OUTPUTS: rounds.split})
    mask, mask_length = kwargs.get("attention_mask"), getattr(generation_config, MASK_LENGTH, -1)
    view = _TargetView(target, rounds, input_ids.shape[1], mask, mask_length)
    with drafting.taps, few_rows_linears(target, assistant_model), rewinding(cache):
        output = bound(view, input_ids, processors, stopping, config, **kwargs)
    return DSparkGenerateOutput(**output, dspark=rounds.stats) if isinstance(output, ModelOutput) else output


def _check_call(target: PreTrainedModel, input_ids: torch.Tensor, cache: Cache | None) -> None:
    if keeps_recurrent_state(target) and not (isinstance(cache, Cache) and any(map(compresses, cache.layers))):
        raise NotImplementedError(
            f"{type(target).__name__} keeps a recurrent state, which dspark_loop='transformers' cannot roll back "
            "after a rejected draft: use 'auto' or 'batched', of the package transformers-dspark."
        )
    if input_ids.shape[0] != 1:
        raise ValueError(
            f"dspark_loop='transformers' takes one prompt, and this call has {input_ids.shape[0]}: use 'auto' or "
            "'batched'."
        )
    if not isinstance(cache, Cache):
        raise NotImplementedError(
            f"{type(target).__name__} uses no `Cache`, so rejected drafts cannot be rolled back."
        )
    for layer in cache.layers:
        # recurrent layers know only after the prefill, when the loop asks them
        if not isinstance(layer, LinearAttentionCacheLayerMixin) and not layer.is_croppable:
            raise NotImplementedError(
                f"A {type(layer).__name__} of this size cannot be rolled back after a rejected draft: use "
                "cache_implementation='dynamic'."
            )


class _Rounds(CandidateGenerator):
    """What happens in each round of the loop: draft, then judge and record."""

    requires_model_outputs = True

    def __init__(
        self,
        drafting: DSparkCandidateGenerator,
        processors: SpeculativeProcessors,
        stopping: SpeculativeStopping,
        cache: Cache | None,
        do_sample: bool,
    ) -> None:
        self.model_kwargs_overrides = drafting.model_kwargs_overrides
        self.taps = drafting.taps
        self.stats = GenerationStats()
        self._drafting, self._processors, self._stopping = drafting, processors, stopping
        self._cache, self._do_sample, self._noise = cache, do_sample, drafting.noise
        self._drafted_at: float | None = None

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs: Any) -> tuple[torch.LongTensor, torch.Tensor]:
        start = time.perf_counter()
        candidates, logits = self._drafting.get_candidates(input_ids, **kwargs)
        if not kwargs["is_first_iteration"]:
            self._drafted_at = time.perf_counter()
            self.stats.draft_seconds += self._drafted_at - start
        if logits is None:  # the loop would choose the token itself, without our noise
            logits = torch.empty(1, 0, 0, device=input_ids.device)
        return candidates, logits

    def verify(
        self,
        candidate_input_ids: torch.Tensor,
        candidate_logits: torch.Tensor,
        candidate_length: int,
        new_logits: torch.Tensor,
        assistant_ensemble_weight: float | None = None,
    ) -> tuple[torch.Tensor, int]:
        """
        Stands in for Transformers' rule of acceptance, `_compat.ACCEPT`.

        Args:
            candidate_input_ids (`torch.LongTensor` of shape `(1, length + width)`): Committed and drafted ids.
            candidate_logits (`torch.FloatTensor` of shape `(1, width, vocab)`): Logits that chose the drafts.
            candidate_length (`int`): width.
            new_logits (`torch.FloatTensor` of shape `(1, width + 1, vocab)`): The target's logits, processed.

        Returns:
            The tokens to commit `(1, n)`, and the number of them that were drafted.
        """
        ids, width = candidate_input_ids.to(new_logits.device), candidate_length
        committed, drafted = ids[:, : ids.shape[1] - width], ids[:, ids.shape[1] - width :]
        if self._do_sample:
            target_probs, draft_probs = new_logits.softmax(dim=-1), candidate_logits.to(ids.device).softmax(dim=-1)
            uniforms = self._noise(1, width, device=ids.device), self._noise(1, device=ids.device)
            verdict = accept(target_probs, draft_probs, drafted, *uniforms)
        else:
            verdict = accept_greedy(new_logits.argmax(dim=-1), drafted)
        accepted, bonus = torch.cat(verdict).tolist()
        if bonus == new_logits.shape[-1]:
            raise ValueError(
                "The target's logits, after all logits processors, leave no token to sample: one forbids too much."
            )
        tokens = torch.cat((drafted[:, :accepted], verdict.bonus[:, None]), dim=1)
        kept = self._stopping.kept(committed, tokens, new_logits)
        self._processors.commit(committed.shape[1] + kept)
        if self._drafted_at is not None:
            self.stats.verify_seconds += time.perf_counter() - self._drafted_at
            self.stats.record_round([width], [min(accepted, kept)], [kept])
        return tokens[:, :kept], kept - 1

    def split(
        self,
        outputs: tuple[Any, ...],
        new_outputs: tuple[torch.Tensor | None, ...],
        cur_len: int,
        added_len: int,
        is_decoder_attention: bool = False,
    ) -> tuple[Any, ...]:
        """
        Stands in for Transformers' `_compat.SPLIT_OUTPUTS`: one entry a token, each as a step of plain decoding
        returns it.

        Args:
            outputs (`tuple`): Entries so far.
            new_outputs (`tuple[torch.FloatTensor]`): For each layer, states `(1, queries, ..., hidden)` or attentions
                `(1, heads, queries, keys)` of the latest step.
            added_len (`int`): Tokens committed in it.
        """
        if isinstance(new_outputs[0], tuple):  # an attention that returns no weights, see `_TargetView`
            return (*outputs, *new_outputs * (added_len if outputs else 1))
        if not outputs:
            return (tuple(new_outputs),)  # the prefill
        entries = []
        for row in range(added_len):
            pick = self._attention_row if is_decoder_attention else _state_row
            entries.append(tuple(None if t is None else pick(layer, t, row) for layer, t in enumerate(new_outputs)))
        return (*outputs, *entries)

    def _attention_row(self, layer: int, attention: torch.Tensor, row: int) -> torch.Tensor:
        cache_layer = (
            self._cache.layers[layer] if self._cache is not None and layer < len(self._cache.layers) else None
        )
        if isinstance(cache_layer, StaticLayer):
            return attention[..., row : row + 1, :]
        end = attention.shape[-1] - attention.shape[-2] + row + 1
        window = getattr(cache_layer, "sliding_window", None) or end
        return attention[..., row : row + 1, max(0, end - window) : end]


def _state_row(layer: int, states: torch.Tensor, row: int) -> torch.Tensor:
    return states[:, row : row + 1]  # streams of a token may follow


class _TargetView:
    """
    The target as the loop sees it: the model itself, but for the candidate generator and the inputs of a prefill
    behind a filled cache.

    Args:
        target (`PreTrainedModel`): The model.
        rounds (`_Rounds`): The candidate generator of this call.
        prompt_length (`int`): Tokens in the `input_ids` of the call.
        mask (`torch.LongTensor` of shape `(1, length)`, *optional*): The call's attention mask.
        mask_length (`int`): Its length before an all-ones mask was dropped; -1 if unknown.
    """

    def __init__(
        self, target: PreTrainedModel, rounds: _Rounds, prompt_length: int, mask: torch.Tensor | None, mask_length: int
    ) -> None:
        self._target, self._rounds = target, rounds
        self._prompt_length, self._mask = prompt_length, mask
        self._mask_length = mask_length if mask is None else mask.shape[1]

    def __getattr__(self, name: str) -> Any:
        if name == CANDIDATE_GENERATOR:
            return lambda **kwargs: self._rounds
        return getattr(self._target, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._rounds.taps.run(*args, **kwargs)
        attentions = outputs.get("attentions")
        if isinstance(attentions, tuple) and not any(isinstance(t, torch.Tensor) for t in attentions):
            outputs.attentions = (attentions,)  # the loop looks at the first; `split` hands on what was there
        return outputs

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        next_sequence_length: int | None = None,
        attention_mask: torch.Tensor | None = None,
        is_first_iteration: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        cached = int(kwargs["cache"].get_seq_length())
        if is_first_iteration and cached and self._mask_length == self._prompt_length:
            # the ids repeat what the cache holds; plain decoding skips that part as well
            embeds = kwargs.get("inputs_embeds")
            next_sequence_length = (input_ids if embeds is None else embeds).shape[1] - cached
        if self._mask is not None and self._mask_length != self._prompt_length:
            # the ids do not repeat it, but the mask does; the loop cut the mask to the length of the ids
            attention_mask = torch.cat(
                (self._mask, self._mask.new_ones(1, input_ids.shape[1] - self._prompt_length)), dim=1
            )
        return self._target.prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            attention_mask=attention_mask,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )


__all__ = ["assisted_decoding", "check_request", "check_tokenizers"]
