"""A canonical configuration in the words of another project, or the reason why that project has no words for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..configuration_dspark import FULL, SLIDING, DSparkConfig


_HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
_BODY = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "attention_bias", "max_position_embeddings",
    "initializer_range", "tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id", "layer_types",
)  # fmt: skip
_TOP = ("block_size", "draft_vocab_size")

Fields = dict[str, Any]


@dataclass(frozen=True)
class Form:
    """
    Args:
        name (`str`): As messages call it.
        write (`Callable`): Configuration fields of a canonical configuration that the form has words for.
        backbones (`tuple[str, ...]`): Backbones that it knows.
        window_from (`str`, *optional*): Where its sliding windows begin; `None` if it has none.
        bidirectional_windows (`bool`): Whether its sliding layers need not be causal in the block.
        writes_t2d (`bool`): Whether its files also hold which target tokens can be proposed.
    """

    name: str
    write: Callable[[DSparkConfig], Fields]
    backbones: tuple[str, ...] = ("qwen3",)
    window_from: str | None = None
    bidirectional_windows: bool = False
    writes_t2d: bool = False

    def config(self, config: DSparkConfig, dtype: torch.dtype) -> Fields:
        """
        Args:
            config (`DSparkConfig`): The canonical configuration.
            dtype (`torch.dtype`): That of the tensors.

        Raises:
            NotImplementedError: the form cannot say something of it.
        """
        if problems := self._unsayable(config):
            raise NotImplementedError(
                f"This drafter cannot be written in the form of {self.name}: {'; '.join(problems)}. The canonical "
                "form keeps everything."
            )
        fields = self.write(config) | {name: getattr(config, name) for name in _TOP}
        if config.target_hidden_size != config.hidden_size:
            fields["target_hidden_size"] = config.target_hidden_size
        if config.confidence_temperatures is not None:
            fields["confidence_temperatures"] = config.confidence_temperatures
        if config.own_embeddings:
            fields["train_embed_tokens"] = True  # so that whoever opens it does not take the target's
        return fields | {"dtype": str(dtype).removeprefix("torch.")}

    def tensors(self, config: DSparkConfig, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors as the form's files hold them; the names are the canonical ones."""
        if not self.writes_t2d or not config.has_reduced_vocabulary:
            return state
        proposed = torch.zeros(config.vocab_size, dtype=torch.bool)
        proposed[torch.arange(config.draft_vocab_size) + state["d2t"].cpu()] = True
        return state | {"t2d": proposed}

    def _unsayable(self, config: DSparkConfig) -> list[str]:
        causal, kinds, problems = set(config.causal_layer_types) & set(config.layer_types), config.layer_types, []
        if config.backbone_type not in self.backbones:
            problems.append(f"it has no backbone_type={config.backbone_type!r}")
        if config.has_attention_sinks:
            problems.append("it has no attention sinks")
        if FULL in causal:
            problems.append("its full attention sees the whole block, here it is causal")
        if SLIDING in kinds and self.window_from is None:
            problems.append("it has no sliding windows")
        elif SLIDING in kinds:
            if config.sliding_window_from != self.window_from:
                problems.append(
                    f"its windows begin at the {self.window_from}, here at the {config.sliding_window_from}"
                )
            if SLIDING not in causal and not self.bidirectional_windows:
                problems.append("its sliding layers are causal in the block, here they see all of it")
        if config.raw_embedding and not config.own_embeddings:
            problems.append("it reads the target's embedding with the norm behind it, here without")
        if config.own_head and not config.own_embeddings and not config.has_reduced_vocabulary:
            problems.append("a head of its own over the whole vocabulary comes with an embedding of its own")
        scale = config.hidden_size**0.5 if config.backbone_type == "gemma4" else 1.0
        if config.own_embeddings and abs(config.embedding_scale - scale) > 1e-6:
            problems.append(f"it scales its own embedding by {scale:g}, here by {config.embedding_scale:g}")
        if config.own_head and config.final_logit_softcapping and config.backbone_type == "qwen3":
            problems.append("it has no softcap on logits of its own head")
        return problems


def _qwen3(config: DSparkConfig) -> Fields:
    rope = dict(config.rope_parameters or {})
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    slides = SLIDING in config.layer_types
    return {name: getattr(config, name) for name in _BODY} | {
        "model_type": "qwen3",
        "hidden_act": config.hidden_act,
        "attention_dropout": 0.0,
        # in all three places where releases of Transformers look
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else scaling,
        "num_target_layers": config.num_target_layers,
        "use_sliding_window": slides,  # without it Qwen3's configuration drops the window
        "sliding_window": config.sliding_window if slides else None,
        "max_window_layers": config.num_hidden_layers,
        "use_cache": True,
    }


def _gemma4(config: DSparkConfig) -> Fields:
    return {name: getattr(config, name) for name in _BODY} | {
        "model_type": "gemma4_text",
        "hidden_activation": config.hidden_act,
        "global_head_dim": config.head_dim,
        "num_global_key_value_heads": config.num_key_value_heads,
        "attention_k_eq_v": config.attention_k_eq_v,
        "final_logit_softcapping": config.final_logit_softcapping,
        "num_target_layers": config.num_target_layers,
        "rope_parameters": {FULL: dict(config.rope_parameters or {})},
        "use_cache": True,
    }


def _layout(config: DSparkConfig) -> Fields:
    """Both flags that engines read, and the number of drafted tokens."""
    return {
        "sample_from_anchor": config.sample_from_anchor,
        "dspark_bonus_anchor": not config.sample_from_anchor,
        "speculative_tokens": config.num_draft_tokens,
    }


def _own_fields(config: DSparkConfig) -> Fields:
    heads = {name: getattr(config, name) for name in _HEADS}
    taps = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)}
    return heads | taps


def _deepspec(config: DSparkConfig) -> Fields:
    gemma4 = config.backbone_type == "gemma4"
    body = _gemma4(config) if gemma4 else _qwen3(config)
    architecture = "Gemma4DSparkModel" if gemma4 else "Qwen3DSparkModel"
    return body | _own_fields(config) | _layout(config) | {"architectures": [architecture]}


def _specforge(config: DSparkConfig) -> Fields:
    own, layout = _own_fields(config), _layout(config)
    nested = own | {
        "projector_type": "dspark",
        "attention_mode": "gqa",
        "sample_from_anchor": config.sample_from_anchor,
    }
    # the heads at the top as well: engines read them there
    return _qwen3(config) | own | layout | {"architectures": ["DSparkDraftModel"], "dflash_config": nested}


def _speculators(config: DSparkConfig) -> Fields:
    bare = not config.markov_rank and not config.enable_confidence_head
    algorithm, architecture = ("dflash", "DFlashDraftModel") if bare else ("dspark", "DSparkDraftModel")
    proposals = {"proposal_type": "greedy", "speculative_tokens": config.num_draft_tokens}
    return {name: getattr(config, name) for name in ("mask_token_id", *(() if bare else _HEADS))} | {
        "architectures": [architecture],
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids],
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": SLIDING in config.layer_types and SLIDING not in config.causal_layer_types,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposals | {"accept_tolerance": 0.0, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": None, "architectures": []},
        },
        "speculators_model_type": algorithm,
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": config.tie_word_embeddings,
        "transformer_layer_config": _qwen3(config),
    }


FORMS = {
    "deepspec": Form("DeepSpec", _deepspec, backbones=("qwen3", "gemma4")),
    "specforge": Form("SpecForge", _specforge, window_from="query"),
    "speculators": Form(
        "speculators", _speculators, window_from="anchor", bidirectional_windows=True, writes_t2d=True
    ),
}


__all__ = ["FORMS", "Form"]
