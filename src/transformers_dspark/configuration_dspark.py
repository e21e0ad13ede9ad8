"""Configuration of a DSpark drafter: what a checkpoint says about itself, nothing about machines or target weights."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig


SPARSE = "deepseek_v4"
BACKBONES = ("qwen3", "qwen3_5", "gemma4", SPARSE)
MARKOV_HEADS = ("vanilla", "gated", "rnn")
FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW_STARTS = ("query", "anchor")
# what only the sparse backbone has, in the words of Transformers' configuration of DeepSeek-V4
SPARSE_COUNTS = (
    "q_lora_rank", "o_groups", "o_lora_rank", "hc_mult", "hc_sinkhorn_iters", "n_routed_experts",
    "num_experts_per_tok",
)  # fmt: skip
SPARSE_FIELDS = (*SPARSE_COUNTS, "hc_eps", "scoring_func", "routed_scaling_factor", "swiglu_limit")
SIZES = (
    "vocab_size", "draft_vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "block_size", "target_hidden_size",
)  # fmt: skip

# What a field may hold, in the configuration of any family; `None` stands for a default and a bool is no number.
TYPES: dict[str, tuple[tuple[type, ...], tuple[str, ...]]] = {
    "a whole number": (
        (int,),
        (
            *SIZES, "max_position_embeddings", "mask_token_id", "num_target_layers", "markov_rank", "pad_token_id",
            "bos_token_id", "global_head_dim", "num_global_key_value_heads", "original_max_position_embeddings",
            "sliding_window", "swa_window_size", "max_window_layers", "speculative_tokens", *SPARSE_COUNTS,
        ),
    ),
    "a whole number or a list of them": ((int, list), ("eos_token_id",)),
    "a number": (
        (int, float),
        (
            "rms_norm_eps", "final_logit_softcapping", "embedding_scale", "initializer_range", "rope_theta", "factor",
            "partial_rotary_factor", "hc_eps", "routed_scaling_factor", "swiglu_limit",
        ),
    ),
    "true or false": (
        (bool,),
        (
            "attention_k_eq_v", "attention_bias", "sample_from_anchor", "enable_confidence_head",
            "confidence_head_with_markov", "own_embeddings", "own_head", "tie_word_embeddings", "raw_embedding",
            "has_attention_sinks", "attention_sink_bias", "query_zero_predicts_next", "dspark_bonus_anchor",
            "dflash_query_causal", "is_causal", "causal", "use_swa", "use_sliding_window",
            "sliding_window_non_causal", "rope_is_neox_style",
        ),
    ),
    "a name": (
        (str,),
        (
            "backbone_type", "hidden_act", "hidden_activation", "layout_source", "markov_head_type", "rope_type",
            "type", "sliding_window_from", "projector_type", "speculators_model_type", "algorithm", "attention_mode",
            "scoring_func",
        ),
    ),
    "a list": (
        (list, tuple),
        (
            "target_layer_ids", "confidence_temperatures", "layer_types", "causal_layer_types", "architectures",
            "aux_hidden_state_layer_ids", "proposal_methods",
        ),
    ),
    "an object of fields": (
        (dict,),
        (
            "rope_parameters", "rope_scaling", "full_attention", "text_config", "per_layer_config", "dspark_config",
            "dflash_config", "speculators_config", "transformer_layer_config", "quantization_config",
            "backbone_config",
        ),
    ),
}  # fmt: skip


def mistyped(fields: Mapping[str, Any]) -> list[str]:
    """What is wrong with the types of a configuration's fields, in words; rotary parameters are fields as well."""
    wrong = [
        f"{name}={fields[name]!r} must be {words}"
        for words, (types, names) in TYPES.items()
        for name in names
        if fields.get(name) is not None
        and (not isinstance(fields[name], types) or (isinstance(fields[name], bool) and bool not in types))
    ]
    wrong += [
        f"{name}={fields[name]!r} must hold names"
        for name in ("layer_types", "causal_layer_types")
        if isinstance(fields.get(name), (list, tuple)) and not all(isinstance(kind, str) for kind in fields[name])
    ]
    inner = [fields.get(name) for name in ("rope_parameters", "rope_scaling", "full_attention", "backbone_config")]
    return wrong + [problem for part in inner if isinstance(part, dict) for problem in mistyped(part)]


class DSparkConfig(PreTrainedConfig):
    r"""
    Canonical configuration of a [`DSparkDrafter`].

    Args:
        vocab_size (`int`): Vocabulary of the target.
        draft_vocab_size (`int`, *optional*): Number of tokens the drafter can propose. Defaults to `vocab_size`; a
            smaller value needs the tensor `d2t` in the checkpoint (target id minus draft id, one per draft id).
        hidden_size (`int`): Width of the drafter and of the target's embedding and head, which it shares.
        intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim (`int`): Geometry of
            the backbone; `num_attention_heads * head_dim` need not equal `hidden_size`.
        backbone_type (`str`): `"qwen3"` (pre-norm, QK-norm), `"qwen3_5"` (the same with gates beside the queries, and
            heads of which only the first channels turn, `partial_rotary_factor` of them), `"gemma4"` (sandwich norms,
            value norm, layer scalar, attention scaling 1) or `"deepseek_v4"` (stages of DeepSeek-V4: several residual
            streams, experts, one latent head of keys that are the values as well; its heads read states before the
            final norm).
        backbone_config (`dict`, *optional*): What only `"deepseek_v4"` has, as in Transformers' `DeepseekV4Config`:
            ranks of the projections, streams, experts and their router. `intermediate_size` is that of an expert.
        attention_k_eq_v (`bool`): Gemma4 only: values are the un-normed keys; there is no value projection.
        final_logit_softcapping (`float`, *optional*): `cap * tanh(logits / cap)` on the base logits.
        embedding_scale (`float`): Factor on rows of the drafter's own embedding table. A target's embedding brings its
            own.
        hidden_act, rms_norm_eps, attention_bias, max_position_embeddings, rope_parameters, initializer_range: As in
            Transformers' models.
        block_size (`int`): Rows of a block. In layout A each of them drafts a token; in layout F all but the anchor's.
        mask_token_id (`int`): Token fed at block rows after the anchor.
        target_layer_ids (`list[int]`): Taps: 0-based target layers whose outputs are read; -1 is the embedding output.
        target_hidden_size (`int`, *optional*): Width of one tap. Defaults to `hidden_size`.
        num_target_layers (`int`, *optional*): Layers of the target that the drafter was trained for.
        sample_from_anchor (`bool`): Layout A (anchor first): row k of the block predicts position anchor+k+1. False
            is layout F (filler): row k predicts anchor+k, and nothing is read from the anchor's own row.
        layout_source (`str`): How the layout was decided when the checkpoint was opened.
        layer_types (`list[str]`, *optional*): `"full_attention"` or `"sliding_attention"` for each layer. Defaults to
            full attention.
        sliding_window (`int`, *optional*): Window of the sliding layers, in tokens.
        sliding_window_from (`str`): Where the window begins. `"query"`: a row at position q sees q-window+1 and what
            follows. `"anchor"`: every row sees the window's tokens before the anchor, and its own block.
        causal_layer_types (`list[str]`, *optional*): Layer types in which a row sees no later row of its block.
            Defaults to none.
        has_attention_sinks (`bool`): Each head has a learned logit beside its keys' that draws attention to nothing.
        markov_rank (`int`): Rank of the sequential head; 0 for none.
        markov_head_type (`str`): `"vanilla"`, `"gated"` or `"rnn"`.
        enable_confidence_head (`bool`): Whether a confidence head exists.
        confidence_head_with_markov (`bool`): Whether it also reads the previous token's Markov embedding.
        confidence_temperatures (`list[float]`, *optional*): One temperature per block position that divides the
            confidence logit (sequential temperature scaling). `None` means 1.
        own_embeddings (`bool`): Whether the drafter holds its own embedding. By default it borrows the target's.
        own_head (`bool`, *optional*): Whether it holds its own head. Defaults to `own_embeddings`.
        raw_embedding (`bool`): Whether a borrowed embedding is read without the norm or scale that the target puts
            behind its table.

    Raises:
        ValueError: a field, or a combination of fields, that no drafter can have.

    Source: DSpark paper, sections on the drafter; field names of the official release where it has one.
    """

    model_type = "dspark"
    _auto_class = "AutoConfig"  # see `DSparkDrafter`

    vocab_size: int = 32000
    draft_vocab_size: int = None  # type: ignore[assignment]  # so marked: filled in by `__post_init__`
    hidden_size: int = 1024
    intermediate_size: int = 3072
    num_hidden_layers: int = 2
    num_attention_heads: int = 16
    num_key_value_heads: int = None  # type: ignore[assignment]
    head_dim: int = None  # type: ignore[assignment]
    backbone_type: str = "qwen3"
    backbone_config: dict[str, Any] | None = None
    attention_k_eq_v: bool = False
    final_logit_softcapping: float | None = None
    embedding_scale: float = 1.0
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    max_position_embeddings: int = 32768
    rope_parameters: dict[str, Any] | None = None
    initializer_range: float = 0.02
    block_size: int = 7
    mask_token_id: int = 0
    target_layer_ids: list[int] = None  # type: ignore[assignment]
    target_hidden_size: int = None  # type: ignore[assignment]
    num_target_layers: int | None = None
    sample_from_anchor: bool = True
    layout_source: str = "canonical"
    layer_types: list[str] = None  # type: ignore[assignment]
    sliding_window: int | None = None
    sliding_window_from: str = "query"
    causal_layer_types: list[str] = None  # type: ignore[assignment]
    has_attention_sinks: bool = False
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    confidence_temperatures: list[float] | None = None
    own_embeddings: bool = False
    own_head: bool = None  # type: ignore[assignment]
    raw_embedding: bool = False
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._check_types(kwargs)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.vocab_size
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.target_layer_ids is None:
            self.target_layer_ids = [-1]
        if self.layer_types is None:
            self.layer_types = [FULL] * self.num_hidden_layers
        if self.causal_layer_types is None:
            self.causal_layer_types = []
        if self.own_head is None:
            self.own_head = self.own_embeddings
        if not self.rope_parameters:
            self.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
        super().__post_init__(**kwargs)
        self._check()

    def _check_types(self, others: dict[str, Any]) -> None:
        problems, fields = mistyped(others | vars(self)), {name for _, names in TYPES.values() for name in names}
        problems += [
            f"{name}=None must be given"
            for name in sorted(fields & vars(self).keys())
            if getattr(self, name) is None and getattr(type(self), name, None) is not None
        ]
        dtype = others.get("torch_dtype") if self.dtype is None else self.dtype
        if dtype is not None:
            import torch

            if not isinstance(getattr(torch, dtype, None) if isinstance(dtype, str) else dtype, torch.dtype):
                problems.append(f"dtype={dtype!r} must be the name of a dtype of PyTorch")
        if problems:
            raise ValueError(f"DSparkConfig: {'; '.join(problems)}.")

    def _check(self) -> None:
        problems = [
            f"{name}={getattr(self, name)!r} must be a whole number of at least 1"
            for name in SIZES
            if getattr(self, name) < 1
        ]
        taps = self.target_layer_ids
        if not taps or not all(type(tap) is int and tap >= -1 for tap in taps) or len(set(taps)) < len(taps):
            problems.append(f"target_layer_ids={taps} must name different target layers, from -1 (embedding) up")
        if problems:  # what follows compares these
            raise ValueError(f"DSparkConfig: {'; '.join(problems)}.")
        heads, kv_heads, rank = self.num_attention_heads, self.num_key_value_heads, self.markov_rank
        if heads % kv_heads:
            problems.append(f"num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}")
        if self.head_dim % 2:
            problems.append(f"head_dim={self.head_dim} must be even for a rotary embedding")
        if self.rotary_size < 2 or self.rotary_size % 2 or self.rotary_size > self.head_dim:
            problems.append(f"partial_rotary_factor leaves {self.rotary_size} channels of a head, which must be even")
        if self.backbone_type not in BACKBONES:
            problems.append(f"backbone_type={self.backbone_type!r} must be one of {BACKBONES}")
        if rank < 0:
            problems.append(f"markov_rank={rank!r} must be 0 (no sequential head) or more")
        elif rank and self.markov_head_type not in MARKOV_HEADS:
            problems.append(f"markov_head_type={self.markov_head_type!r} must be one of {MARKOV_HEADS}")
        if self.enable_confidence_head and self.confidence_head_with_markov and not rank:
            problems.append("confidence_head_with_markov=True needs markov_rank > 0")
        if not 0 <= self.mask_token_id < self.vocab_size:
            problems.append(f"mask_token_id={self.mask_token_id} must lie in 0..{self.vocab_size - 1}")
        if self.draft_vocab_size > self.vocab_size:
            problems.append(f"draft_vocab_size={self.draft_vocab_size} must lie in 1..vocab_size={self.vocab_size}")
        problems += self._attention_problems() + self._sparse_problems()
        if self.num_draft_tokens < 1:
            problems.append(f"block_size={self.block_size} must be at least 2 with sample_from_anchor=False")
        temperatures, drafted = self.confidence_temperatures, max(self.num_draft_tokens, 0)
        if temperatures is not None and (
            len(temperatures) != drafted
            or not all(type(t) in (int, float) and 0 < t < float("inf") for t in temperatures)
        ):
            problems.append(f"confidence_temperatures={temperatures} must hold {drafted} positive numbers")
        if problems:
            raise ValueError(f"DSparkConfig: {'; '.join(problems)}.")

    def _attention_problems(self) -> list[str]:
        kinds, problems = self.layer_types, []
        if len(kinds) != self.num_hidden_layers or any(kind not in (FULL, SLIDING) for kind in kinds):
            problems.append(f"layer_types={kinds} must name {FULL} or {SLIDING} for {self.num_hidden_layers} layers")
        if SLIDING in kinds and (self.sliding_window or 0) < 1:
            problems.append(
                f"sliding_window={self.sliding_window} must be at least 1, since layer_types has {SLIDING}"
            )
        if self.sliding_window_from not in WINDOW_STARTS:
            problems.append(f"sliding_window_from={self.sliding_window_from!r} must be one of {WINDOW_STARTS}")
        if any(kind not in (FULL, SLIDING) for kind in self.causal_layer_types):
            problems.append(f"causal_layer_types={self.causal_layer_types} must name only {FULL} and {SLIDING}")
        if self.backbone_type == "gemma4" and SLIDING in kinds:
            problems.append(f"layer_types={kinds} must be {FULL} throughout with backbone_type='gemma4'")
        return problems

    def _sparse_problems(self) -> list[str]:
        given, problems = self.backbone_config or {}, []
        if not self.is_sparse:
            return [f"backbone_config={given} belongs to backbone_type={SPARSE!r}"] if given else []
        if missing := [name for name in SPARSE_FIELDS if given.get(name) is None]:
            return [f"backbone_config lacks {', '.join(missing)}"]
        problems += [f"{name}={given[name]} must be at least 1" for name in SPARSE_COUNTS if given[name] < 1]
        if problems:
            return problems
        if self.num_attention_heads % given["o_groups"]:
            problems.append(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of o_groups={given['o_groups']}"
            )
        if given["num_experts_per_tok"] > given["n_routed_experts"]:
            problems.append(
                f"num_experts_per_tok={given['num_experts_per_tok']} must be at most "
                f"n_routed_experts={given['n_routed_experts']}"
            )
        if self.num_key_value_heads != 1:
            problems.append(f"num_key_value_heads={self.num_key_value_heads} must be 1 with this backbone")
        if set(self.layer_types) != {SLIDING}:
            problems.append(f"layer_types={self.layer_types} must be {SLIDING} throughout with this backbone")
        if self.markov_rank and self.markov_head_type != "vanilla":
            problems.append(f"markov_head_type={self.markov_head_type!r} must be 'vanilla' with this backbone")
        return problems

    def shorten(self, block_size: int) -> None:
        """
        Makes blocks shorter; the rows that are left have the temperatures that they had.

        Raises:
            ValueError: the checkpoint's block has fewer rows, or no row would draft.
        """
        least = 1 + self.first_draft_row
        if type(block_size) is not int or not least <= block_size <= self.block_size:
            raise ValueError(
                f"block_size={block_size!r} must lie in {least}..{self.block_size}, the rows that the drafter was "
                "trained with."
            )
        self.block_size = block_size
        if self.confidence_temperatures is not None:
            self.confidence_temperatures = self.confidence_temperatures[: self.num_draft_tokens]

    @property
    def is_sparse(self) -> bool:
        """Whether the backbone is made of DeepSeek-V4's stages."""
        return self.backbone_type == SPARSE

    @property
    def rotary_size(self) -> int:
        """Channels of a head that turn: the first ones, or with the sparse backbone the last ones."""
        partial = self.is_sparse or self.backbone_type == "qwen3_5"
        factor = (self.rope_parameters or {}).get("partial_rotary_factor", 1.0) if partial else 1.0
        return int(self.head_dim * factor)

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that a block drafts, gamma: in layout F the anchor's row drafts none."""
        return self.block_size - self.first_draft_row

    @property
    def first_draft_row(self) -> int:
        """The block's first row that drafts a token."""
        return 0 if self.sample_from_anchor else 1

    @property
    def needs_masks(self) -> bool:
        """Whether some layer does not show every row of a block all of the context and the block."""
        return SLIDING in self.layer_types or bool(set(self.layer_types) & set(self.causal_layer_types))

    @property
    def num_taps(self) -> int:
        """Number of target layers that the drafter reads."""
        return len(self.target_layer_ids)

    @property
    def has_reduced_vocabulary(self) -> bool:
        """Whether the drafter proposes from a subset of the target's vocabulary."""
        return self.draft_vocab_size < self.vocab_size


__all__ = ["FULL", "SLIDING", "SPARSE", "SPARSE_COUNTS", "SPARSE_FIELDS", "DSparkConfig", "mistyped"]
