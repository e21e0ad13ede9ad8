"""Drafts for Transformers' assisted loop: from the target's last outputs to candidate ids and the logits that drew
them.

This module does not decide what is accepted; it knows one row, its context and its options.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import Cache, StaticLayer
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.utils import ModelOutput

from .generation_config import DraftingOptions, eos_ids
from .processors import SpeculativeProcessors
from .sampling import Noise, draw, pad_vocabulary
from .target import TargetTaps, learned_positions


class DSparkCandidateGenerator(CandidateGenerator):
    """
    Proposes a block of tokens from a [`DSparkDrafter`] in each round of Transformers' assisted loop (batch size 1).

    Drafts are chosen under the call's own logits processors: argmax when the call is greedy, a draw from the processed
    distribution when it samples. The logits returned with them are those that chose them, so acceptance is exact.

    Args:
        drafter (`DSparkDrafter`): The drafter; it is bound to the target.
        target (`PreTrainedModel`): The model whose distribution is kept.
        generation_config (`GenerationConfig`): The call's configuration, as `generate` completes it.
        logits_processor (`LogitsProcessorList`, *optional*): The call's processors and warpers.

    Raises:
        ValueError: the drafter does not fit the target, or an option is out of range.
    """

    requires_model_outputs = True

    def __init__(
        self,
        drafter: Any,  # its code may come from a repository, so its class is of no use
        target: PreTrainedModel,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList | None = None,
    ) -> None:
        self.drafter = drafter.bind_target(target)
        self.target = target
        self.options = DraftingOptions.resolve(generation_config, drafter)
        wants_all = generation_config.return_dict_in_generate and generation_config.output_hidden_states
        self.taps = TargetTaps(target, drafter.config.target_layer_ids, keep_all=bool(wants_all))
        self.model_kwargs_overrides = self.taps.forward_kwargs
        self.noise = Noise(self.options.seed_of(0))
        self._eos_ids = eos_ids(generation_config)
        if not isinstance(logits_processor, SpeculativeProcessors):
            listed = [] if logits_processor is None else logits_processor
            logits_processor = SpeculativeProcessors(listed, self._eos_ids)
        self.processors = logits_processor
        self._do_sample = bool(generation_config.do_sample)
        self._max_length = generation_config.max_length
        self._context = drafter.new_context()
        self._prefilled = False
        self._cached_before = 0
        self._unnamed = 0
        self._room: int | None = None
        self._positions = learned_positions(target)

    @torch.no_grad()
    def get_candidates(
        self,
        input_ids: torch.LongTensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: ModelOutput | None = None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
        **kwargs: Any,
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `(1, length)`): Committed tokens; the last is the anchor.
            model_kwargs (`dict`): The loop's arguments of the target, with its mask and positions up to the anchor.
            model_outputs (`ModelOutput`): Outputs of the target's latest step. `None` before the prefill.
            is_first_iteration (`bool`): Whether the prefill has not run yet; then nothing is drafted.
            n_last_matches (`int`): Drafts accepted in the latest step.

        Returns:
            The ids with the drafts behind them, and the float32 logits `(1, width, vocab)` that chose the drafts.
            `None` in place of the logits if nothing was drafted.
        """
        model_kwargs = model_kwargs or {}
        if is_first_iteration or model_outputs is None:
            cache = model_kwargs.get("cache")
            self._cached_before = int(cache.get_seq_length()) if cache is not None else 0
            self._room = _room(cache)
            return input_ids, None
        width = min(self.options.width, self._max_length - input_ids.shape[1] - 1)
        if width <= 0 or not self.processors.can_speculate:
            return input_ids, None
        anchor_position = self._commit(input_ids, model_kwargs, model_outputs, int(n_last_matches))
        # a criterion may end the text before it leaves the cache or the positions: no draft leaves them either
        if self._room is not None:
            width = min(width, self._room - self._unnamed - input_ids.shape[1])
        if self._positions is not None:
            width = min(width, self._positions - 1 - int(anchor_position))
        if width <= 0:
            return input_ids, None
        tokens, logits = self._draft(input_ids, anchor_position, width, model_outputs.logits.shape[-1])
        if tokens.shape[1] == 0:
            return input_ids, None
        return torch.cat((input_ids, tokens), dim=1), logits  # type: ignore[return-value]

    def _commit(
        self, input_ids: torch.Tensor, model_kwargs: dict[str, Any], outputs: ModelOutput, n_last_matches: int
    ) -> torch.Tensor:
        """
        Extends the drafter's context by the tokens of the target's latest step that were kept; returns the anchor's
        position `(1,)`.
        """
        taps = self.taps.read(outputs, self.drafter.device, self.drafter.dtype)  # [1, n, m * hidden]
        if self._prefilled:
            taps = taps[:, : n_last_matches + 1]
        count = taps.shape[1]
        if not self._prefilled:
            # tokens without an id in `input_ids`: embeddings given as a prompt, or a cache whose text the caller did
            # not repeat
            self._unnamed = self._cached_before + count + 1 - input_ids.shape[1]
        mask, positions = _mask_and_positions(input_ids, input_ids.shape[1] + self._unnamed, model_kwargs)
        if not self._prefilled and self._cached_before and not self._unnamed:
            self._rebuild(input_ids, mask, positions)
        self._prefilled = True
        self._extend(taps, mask[:, -count - 1 : -1], positions[:, -count - 1 : -1])
        return positions[:, -1]

    def _extend(self, taps: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> None:
        real = mask[0].bool().to(taps.device)  # padding is no context
        self.drafter.extend_context(self._context, taps[:, real], positions.to(taps.device)[:, real])

    def _rebuild(self, input_ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> None:
        """
        A cache from an earlier call brings no taps for what it holds, so the target reads those tokens once more,
        without a cache.
        """
        length, accepted = self._cached_before, inspect.signature(self.target.forward).parameters
        tensors = {"attention_mask": mask[:, :length], "position_ids": positions[:, :length]}
        inputs: dict[str, Any] = {n: t.to(self.target.device) for n, t in tensors.items() if n in accepted}
        if "logits_to_keep" in accepted:
            inputs["logits_to_keep"] = 1
        outputs = self.taps.run(
            input_ids=input_ids[:, :length].to(self.target.device),
            use_cache=False,
            **inputs,
            **self.model_kwargs_overrides,
        )
        taps = self.taps.read(outputs, self.drafter.device, self.drafter.dtype)
        self._extend(taps, mask[:, :length], positions[:, :length])

    def _draft(
        self, input_ids: torch.Tensor, anchor_position: torch.Tensor, width: int, vocab_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Up to `width` tokens `(1, w)` and the logits `(1, w, vocab_size)` that chose them, on the device of
        `input_ids`.
        """
        device = input_ids.device
        processors = self.processors.for_drafting()
        uniforms = self.noise(width, 1, device=device) if self._do_sample else None
        threshold = self.options.confidence_threshold
        drawable: list[torch.Tensor] = []

        def select(k: int, logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scores = pad_vocabulary(logits.to(device, torch.float32), vocab_size)
            scores = processors(torch.cat((input_ids, tokens.to(device)), dim=1), scores.clone())
            some = torch.isfinite(scores.amax(dim=-1))  # NaN and +inf show up there as well
            drawable.append(some)
            if uniforms is None:
                chosen = scores.argmax(dim=-1)
            else:
                chosen = draw(scores.softmax(dim=-1), uniforms[k])
            return torch.where(some, chosen, 0), scores

        def keep_going(k: int, confidence: torch.Tensor | None, tokens: torch.Tensor) -> bool:
            if k and self.processors.users_own and (not drawable[-1] or int(tokens[0, -1]) in self._eos_ids):
                return False  # a user's grammar need not know how to go on from here
            return confidence is None or threshold <= 0 or bool((confidence >= threshold).all())

        proposal = self.drafter.propose(
            input_ids[:, -1],
            anchor_position,
            self._context,
            width=width,
            select=select,
            keep_going=keep_going if threshold > 0 or self.processors.users_own else None,
        )
        length = self._usable(proposal.tokens, drawable)
        return proposal.tokens[:, :length].to(device), proposal.logits[:, :length]

    def _usable(self, tokens: torch.Tensor, drawable: list[torch.Tensor]) -> int:
        """
        Drafts before the first position with no possible token, or with logits that are no numbers, up to and
        including a first end-of-sequence token.
        """
        if not drawable:
            return 0
        flags = torch.cat(drawable).to(tokens.device)
        for k, (token, possible) in enumerate(
            torch.stack((tokens[0], flags.long())).T.tolist()
        ):  # the round's one transfer
            if not possible:
                return k
            if token in self._eos_ids:
                return k + 1
        return tokens.shape[1]


def _room(cache: Cache | None) -> int | None:
    """Tokens that a cache of fixed size holds."""
    layers = [] if cache is None else [layer for layer in cache.layers if isinstance(layer, StaticLayer)]
    return min((layer.get_max_length() for layer in layers), default=None)


def _mask_and_positions(
    input_ids: torch.Tensor, length: int, model_kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Mask and positions `(1, length)` up to the anchor, as the target counts them. Without `position_ids` it counts real
    tokens.
    """
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if mask is None:
        mask = input_ids.new_ones(1, length)
    if positions is None:
        positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
    elif positions.dim() == 3:
        positions = positions[0]  # multimodal rotary positions: the first axis is the text's
    return mask, positions


__all__ = ["DSparkCandidateGenerator"]
