"""
The drafter inside DeepSeek-V4: `mtp.*` tensors of the target's own files, `dspark_*` fields of its configuration.

Only these tensors are read. Weights of 8 and 4 bits become floating point one after another, so that beside the
drafter no more than one of them is in memory.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers.utils import logging

from ..configuration_dspark import SLIDING, SPARSE, SPARSE_FIELDS, DSparkConfig, mistyped
from .dequantize import dequantized, unpacked_shape
from .files import OpenedCheckpoint
from .slices import Slice, find_slices, folder_of_some, total_bytes


NAME = "DSpark embedded in a DeepSeek-V4 target"
EVIDENCE = "field dspark_block_size"
_OURS = re.compile(r"^(?:model\.)?mtp\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"^ffn\.experts\.(\d+)\.w([123])\.weight$")
_SCALES = (".scale", ".weight_scale_inv")
_REQUIRED = ("dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids")
# names in a stage, and those that only one stage has; the latter lose the stage's prefix
_STAGE = {
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.attn_sink": "self_attn.sinks",
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
} | {f"hc_{part}_{name}": f"{part}_hc.{name}" for part in ("attn", "ffn") for name in ("fn", "base", "scale")}
_ONCE = {
    "main_proj.weight": "fc.weight",
    "main_norm.weight": "hidden_norm.weight",
    "norm.weight": "norm.weight",
    "hc_head_fn": "hc_head.hc_fn",
    "hc_head_base": "hc_head.hc_base",
    "hc_head_scale": "hc_head.hc_scale",
    "markov_head.markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_head.markov_w2.weight",
    "confidence_head.proj.weight": "confidence_head.proj.weight",
}

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class MemoryPlan:
    """
    What loading a drafter out of its target's checkpoint takes.

    Args:
        files (`int`): Files that hold some of its tensors; no other is opened.
        bytes_read (`int`): Bytes of its tensors.
        bytes_of_checkpoint (`int`, *optional*): Bytes of all tensors, where the index says.
        bytes_in_memory (`int`): Bytes of the drafter once it is loaded.
        dtype (`torch.dtype`): Of its matrices then.
    """

    files: int
    bytes_read: int
    bytes_of_checkpoint: int | None
    bytes_in_memory: int
    dtype: torch.dtype

    def __str__(self) -> str:
        whole = f" of the checkpoint's {_size(self.bytes_of_checkpoint)}" if self.bytes_of_checkpoint else ""
        return (
            f"{_size(self.bytes_read)}{whole} are the drafter's, in {self.files} file{'s' * (self.files != 1)}; in "
            f"memory it needs {_size(self.bytes_in_memory)} in {str(self.dtype).removeprefix('torch.')}"
        )


@dataclass(frozen=True)
class Embedded:
    """
    A drafter inside its target's checkpoint, known by configuration and headers alone.

    Args:
        config (`DSparkConfig`): Its canonical configuration.
        slices (`list[Slice]`): Its tensors in the files.
        plan (`MemoryPlan`): What loading it takes.
        folder (`Path`): Where the files are.
    """

    config: DSparkConfig
    slices: list[Slice]
    plan: MemoryPlan
    folder: Path

    @classmethod
    def find(
        cls,
        path: str | os.PathLike[str],
        raw: Mapping[str, Any],
        *,
        dtype: Any = None,
        sample_from_anchor: bool | None = None,
        **hub: Any,
    ) -> Embedded:
        """
        Reads the configuration and the files' headers, no tensor.

        Args:
            path (`str` or `os.PathLike`): Folder or Hub repository of the target.
            raw (`Mapping`): Its configuration.
            dtype (`torch.dtype` or `str`, *optional*): Of the drafter's matrices; bfloat16 unless given.
            sample_from_anchor (`bool`, *optional*): The layout, if the caller knows better.

        Raises:
            ValueError: a field or tensor is missing or contradicts another.
        """
        folder = folder_of_some(path, is_drafters, **hub)
        slices = find_slices(folder, is_drafters)
        if not slices:
            raise ValueError(
                "the configuration tells of a drafter (dspark_block_size), but the files hold no mtp.* tensors."
            )
        shapes = {piece.name: unpacked_shape(piece.shape, piece.dtype) for piece in slices}
        config = _config(raw, shapes, sample_from_anchor)
        dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        dtype = dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
        plan = MemoryPlan(
            files=len({piece.file for piece in slices}),
            bytes_read=sum(piece.size for piece in slices),
            bytes_of_checkpoint=total_bytes(folder),
            bytes_in_memory=sum(
                math.prod(shapes[piece.name]) * (4 if _stays_exact(piece) else dtype.itemsize)
                for piece in slices
                if not piece.name.endswith(_SCALES)
            ),
            dtype=dtype,
        )
        return cls(config, slices, plan, folder)

    def open(self) -> OpenedCheckpoint:
        """
        Reads the tensors.

        Raises:
            ValueError: an expert is missing, or scales do not fit.
        """
        return OpenedCheckpoint(self.config, _canonical(self), self.plan.dtype, NAME)


def is_drafters(name: str) -> bool:
    """Whether a tensor of the target's checkpoint is the drafter's."""
    return _OURS.match(name) is not None


def holds_drafter(raw: Mapping[str, Any]) -> bool:
    """Whether a target's configuration tells of a drafter inside its checkpoint."""
    return "dspark_block_size" in raw or "dspark_block_size" in (raw.get("text_config") or {})


def open_embedded(path: str | os.PathLike[str], raw: Mapping[str, Any], **kwargs: Any) -> OpenedCheckpoint:
    """Says what it takes, then reads; arguments as for [`Embedded.find`]."""
    found = Embedded.find(path, raw, **kwargs)
    logger.warning(f"DeepSeek-V4's drafter: {found.plan}.")
    return found.open()


def _config(
    raw: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], sample_from_anchor: bool | None
) -> DSparkConfig:
    from transformers import DeepseekV4Config

    given = dict(raw.get("text_config") or {}) | dict(raw)
    if missing := [name for name in _REQUIRED if given.get(name) is None]:
        raise ValueError(f"the configuration lacks {', '.join(missing)}.")
    if given.get("n_shared_experts", 1) != 1:
        raise ValueError(f"n_shared_experts={given['n_shared_experts']} must be 1.")
    if wrong := mistyped(given):
        raise ValueError(f"the configuration cannot be read: {'; '.join(wrong)}.")
    try:
        target = DeepseekV4Config.from_dict({n: v for n, v in given.items() if n != "quantization_config"})
    except (StrictDataclassError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"the configuration cannot be read: {' '.join(str(error).split()).rstrip('.')}.") from error
    stages = {int(match[1]) for name in shapes if (match := _OURS.match(name))}
    if stages != set(range(len(stages))):
        raise ValueError(f"the files hold the drafter's stages {sorted(stages)}, which are not all from 0 on.")
    last = {match[2]: shape for name, shape in shapes.items() if (match := _OURS.match(name))}
    markov, confidence = last.get("markov_head.markov_w1.weight"), last.get("confidence_head.proj.weight")
    rank = int(given.get("dspark_markov_rank") or 0) if markov is None else markov[1]
    return DSparkConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.moe_intermediate_size,
        num_hidden_layers=len(stages),
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=1,
        head_dim=target.head_dim,
        backbone_type=SPARSE,
        backbone_config={name: getattr(target, name) for name in SPARSE_FIELDS},
        hidden_act=target.hidden_act,
        rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
        rope_parameters=dict(target.rope_parameters["main"]),
        initializer_range=target.initializer_range,
        block_size=given["dspark_block_size"],
        mask_token_id=given["dspark_noise_token_id"],
        target_layer_ids=list(given["dspark_target_layer_ids"]),
        num_target_layers=target.num_hidden_layers,
        sample_from_anchor=sample_from_anchor is not False,
        layout_source="family" if sample_from_anchor is None else "argument",
        layer_types=[SLIDING] * len(stages),
        sliding_window=target.sliding_window,
        sliding_window_from="anchor",
        has_attention_sinks=True,
        markov_rank=rank,
        enable_confidence_head=confidence is not None,
        confidence_head_with_markov=confidence is not None and confidence[1] == target.hidden_size + rank > rank > 0,
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
    )


def _canonical(found: Embedded) -> dict[str, torch.Tensor]:
    scales = {p.name.removesuffix(end): p for end in _SCALES for p in found.slices if p.name.endswith(end)}
    config, dtype, tensors, seen = found.config, found.plan.dtype, dict[str, torch.Tensor](), set()
    experts = (config.backbone_config or {})["n_routed_experts"]
    for piece in found.slices:
        match = _OURS.match(piece.name)
        if match is None or piece.name.endswith(_SCALES):
            continue
        stage, name = match[1], match[2]
        scale = scales.pop(piece.name.removesuffix(".weight"), None)
        tensor = _floating(piece, scale, dtype)
        if expert := _EXPERT.match(name):
            index, part = int(expert[1]), expert[2]
            if index >= experts:
                raise ValueError(f"{piece.name} is beyond the {experts} experts that the configuration tells of.")
            stacked = _expert_rows(tensors, f"layers.{stage}.mlp.experts.", part, experts, config, dtype)
            if stacked[index].shape != tensor.shape:
                raise ValueError(
                    f"{piece.name} has shape {tuple(tensor.shape)} instead of {tuple(stacked[index].shape)}."
                )
            stacked[index] = tensor
            seen.add((stage, index, part))
        elif name in _ONCE:
            if _ONCE[name] in tensors:
                raise ValueError(f"the files hold {name} in two stages; it belongs to one.")
            tensors[_ONCE[name]] = tensor
        else:
            tensors[f"layers.{stage}.{_STAGE[name]}" if name in _STAGE else piece.name] = tensor
    wanted = {
        (str(stage), index, part)
        for stage in range(config.num_hidden_layers)
        for index in range(experts)
        for part in "123"
    }
    if lost := sorted(wanted - seen):
        names = [f"mtp.{stage}.ffn.experts.{index}.w{part}.weight" for stage, index, part in lost]
        raise ValueError(f"missing: {', '.join(names[:5])}{f' and {len(names) - 5} more' * (len(names) > 5)}.")
    if scales:
        raise ValueError(f"scales without their weight: {', '.join(sorted(p.name for p in scales.values())[:5])}.")
    if config.enable_confidence_head:  # that of this family has no bias
        tensors["confidence_head.proj.bias"] = torch.zeros(1, dtype=dtype)
    return tensors


def _expert_rows(
    tensors: dict[str, torch.Tensor], prefix: str, part: str, experts: int, config: DSparkConfig, dtype: torch.dtype
) -> torch.Tensor:
    """Where an expert's matrix belongs, `(experts, rows, columns)`: `w1` above `w3` in one tensor, `w2` in another."""
    inner, width = config.intermediate_size, config.hidden_size
    name, shape = ("down_proj", (width, inner)) if part == "2" else ("gate_up_proj", (2 * inner, width))
    if prefix + name not in tensors:
        tensors[prefix + name] = torch.empty(experts, *shape, dtype=dtype)
    whole = tensors[prefix + name]
    return {"1": whole[:, :inner], "2": whole, "3": whole[:, inner:]}[part]


def _floating(piece: Slice, scale: Slice | None, dtype: torch.dtype) -> torch.Tensor:
    """A tensor's numbers: matrices in `dtype`, what stays exact in float32."""
    tensor = piece.read()
    if scale is not None:
        try:
            return dequantized(tensor, scale.read(), dtype)
        except ValueError as error:
            raise ValueError(f"{piece.name}: {error}.") from error
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        raise ValueError(f"{piece.name} holds {tensor.dtype} but the files hold no scales for it.")
    return tensor.float() if _stays_exact(piece) else tensor.to(dtype)


def _stays_exact(piece: Slice) -> bool:
    """Vectors, and what mixes the residual streams, are float32 in the drafter as well."""
    return len(piece.shape) < 2 or "hc_" in piece.name


def _size(count: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"


__all__ = ["EVIDENCE", "NAME", "Embedded", "MemoryPlan", "holds_drafter", "is_drafters", "open_embedded"]
