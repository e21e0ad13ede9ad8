"""A checkpoint's tensors in canonical terms: names, fused and interleaved matrices, vocabulary map, dtypes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch


_PREFIXES = ("model.", "draft_model.", "logit_head.")
_ALIASES = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}
_SINKS = (".self_attn.sinks", ".self_attn.attention_sink_bias")
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


def canonical_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """
    Strips prefixes and drops what follows from the configuration or belongs to the target.

    Raises:
        ValueError: two tensors are the same one.
    """
    named: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        short = name
        for prefix in _PREFIXES:
            short = short.removeprefix(prefix)
        short = _ALIASES.get(short, short)
        if short.endswith(_SINKS[0]):
            short = short.removesuffix(_SINKS[0]) + _SINKS[1]
        if short.endswith("inv_freq") or short == "t2d" or short.startswith("verifier_"):
            continue
        if short in named:
            raise ValueError(f"The checkpoint holds {short} twice, once as {name}; save it once.")
        named[short] = tensor
    return named


def check_kinds(tensors: Mapping[str, torch.Tensor]) -> None:
    """
    Raises:
        ValueError: a weight is no floating point tensor, or a matrix has not two dimensions.
    """
    wrong = [
        f"{name} holds {tensor.dtype}, but weights must be floating point of 16 bits or more"
        for name, tensor in tensors.items()
        if name != "d2t" and (not tensor.is_floating_point() or tensor.dtype.itemsize < 2)
    ]
    if "d2t" in tensors and (tensors["d2t"].is_floating_point() or tensors["d2t"].dim() != 1):
        wrong.append("d2t must hold one whole number for each draft id")
    wrong += [
        f"{name} has shape {tuple(tensors[name].shape)}, but must have two dimensions"
        for name in ("fc.weight", "markov_head.markov_w1.weight", "confidence_head.proj.weight")
        if name in tensors and tensors[name].dim() != 2
    ]
    if wrong:
        raise ValueError(f"Tensors do not match the configuration: {'; '.join(wrong)}.")


def split_fused(tensors: Mapping[str, torch.Tensor], heads: int, kv_heads: int) -> dict[str, torch.Tensor]:
    """
    Splits `qkv_proj` and `gate_up_proj`, whose rows are those of the single matrices one after another.

    Raises:
        ValueError: the rows cannot be divided so.
    """
    parts = {
        ".qkv_proj.": ((".q_proj.", heads), (".k_proj.", kv_heads), (".v_proj.", kv_heads)),
        ".gate_up_proj.": ((".gate_proj.", 1), (".up_proj.", 1)),
    }
    single: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        fused = next((part for part in parts if part in name), None)
        if fused is None:
            single[name] = tensor
            continue
        shares = [share for _, share in parts[fused]]
        unit, rest = divmod(tensor.shape[0], sum(shares))
        if rest:
            raise ValueError(f"{name} has {tensor.shape[0]} rows, which {sum(shares)} equal parts do not add up to.")
        pieces = tensor.split([unit * share for share in shares])
        single |= {name.replace(fused, part): piece for (part, _), piece in zip(parts[fused], pieces, strict=True)}
    return single


def head_dim_of(tensors: Mapping[str, torch.Tensor]) -> int | None:
    """The width of one attention head, by the norm of the queries."""
    norm = tensors.get("layers.0.self_attn.q_norm.weight")
    return None if norm is None else norm.shape[0]


def without_interleaving(tensors: Mapping[str, torch.Tensor], head_dim: int) -> dict[str, torch.Tensor]:
    """
    Reorders queries and keys that rotate neighbouring channels so that they rotate the two halves of a head, as the
    canonical form does. Their products stay what they were.
    """
    turned = dict(tensors)
    for name, tensor in tensors.items():
        if any(part in name for part in (".q_proj.", ".k_proj.", ".q_norm.", ".k_norm.")):
            if head_dim < 2 or head_dim % 2 or tensor.shape[0] % head_dim:
                raise ValueError(f"{name} has {tensor.shape[0]} rows, which are no heads of head_dim={head_dim}.")
            pairs = tensor.unflatten(0, (-1, head_dim // 2, 2))
            turned[name] = pairs.transpose(1, 2).flatten(0, 2)
    return turned


def with_whole_norms(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """
    Adds 1 to the norms of a drafter that keeps them as offsets from 1, as Qwen3.5's own modules do; other drafters for
    such targets have Qwen3's, whose weights are about 1 themselves.
    """
    norms = {name: tensor for name, tensor in tensors.items() if name.endswith("norm.weight")}
    if not norms or torch.cat([tensor.flatten().float() for tensor in norms.values()]).mean() > 0.5:
        return dict(tensors)
    return dict(tensors) | {name: (tensor.float() + 1).to(tensor.dtype) for name, tensor in norms.items()}


def vocabulary(flat: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> int:
    """
    Number of tokens that can be proposed; leaves `d2t` among the tensors only if it is fewer than the target's.

    Raises:
        ValueError: a map without need of one.
    """
    size, found = flat.get("draft_vocab_size"), tensors.get("d2t")
    if size is None:
        size = flat["vocab_size"] if found is None else found.shape[0]
    if found is not None and size >= flat["vocab_size"]:
        if bool(found.any()):
            raise ValueError(
                f"d2t maps ids although draft_vocab_size={size} is the whole vocabulary; one of the two is wrong."
            )
        del tensors["d2t"]
    elif found is not None:
        tensors["d2t"] = found.long()
    return int(size)


def same_embeddings(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether one table serves as both: the file has no head, or a copy of its embedding."""
    embedding, head = tensors.get(EMBEDDING), tensors.get(HEAD)
    return head is None or (embedding is not None and torch.equal(embedding, head))


def body_dtype(tensors: Mapping[str, torch.Tensor]) -> torch.dtype:
    """The widest dtype among the body's matrices. Heads and norms may differ; they follow the body when loaded."""
    body = [t.dtype for name, t in tensors.items() if name.startswith(("fc.", "layers.")) and t.dim() > 1]
    return functools.reduce(torch.promote_types, body)


__all__ = [
    "EMBEDDING", "HEAD", "body_dtype", "canonical_names", "check_kinds", "head_dim_of", "same_embeddings",
    "split_fused", "vocabulary", "with_whole_norms", "without_interleaving",
]  # fmt: skip
