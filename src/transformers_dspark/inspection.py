"""What a checkpoint is, as a report: its family and why, how it would be read, what it needs, or why it is refused."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard

from .checkpoints import HUB_ARGUMENTS, deepseek_v4, family_of, read_config
from .checkpoints.files import local_folder, read_tensors
from .checkpoints.tensors import EMBEDDING, HEAD, canonical_names
from .checkpoints.unsupported import other_kind
from .configuration_dspark import SLIDING, DSparkConfig
from .modeling_dspark import DSparkDrafter


_OPTIONAL = (EMBEDDING, HEAD, "d2t")  # what a drafter may leave in the file


@dataclass(frozen=True)
class Inspection:
    """
    Args:
        path (`str`): Folder or Hub repository.
        family (`str`): Its family; `"canonical"` for this package's own form.
        recognised_by (`str`): What in the configuration says so.
        problem (`str`, *optional*): Why it cannot be opened; then nothing below is known.
        config (`DSparkConfig`, *optional*): Its canonical configuration.
        target_name (`str`, *optional*): The target that it was made for, where the checkpoint names one.
        dtypes (`list[str]`): Those of the file's tensors.
        parameters (`int`): Numbers that the drafter keeps.
        bytes_in_file (`int`): Size of the file's tensors.
        bytes_kept (`int`): What of it the drafter keeps in memory, in the file's dtype.
        left_out (`list[str]`): Tensors of the file that are not needed, or borrowed from the target.
        plan (`str`, *optional*): What loading takes, of a drafter inside its target's checkpoint; nothing else of that
            is read.
    """

    path: str
    family: str
    recognised_by: str
    problem: str | None = None
    config: DSparkConfig | None = None
    target_name: str | None = None
    dtypes: list[str] = field(default_factory=list)
    parameters: int = 0
    bytes_in_file: int = 0
    bytes_kept: int = 0
    left_out: list[str] = field(default_factory=list)
    plan: str | None = None

    @classmethod
    def of(cls, path: str | os.PathLike[str], **kwargs: Any) -> Inspection:
        """
        Opens a checkpoint as [`DSparkDrafter.from_pretrained`] would, and reports.

        Args:
            path (`str` or `os.PathLike`): Folder or Hub repository.
            kwargs: As for `DSparkDrafter.from_pretrained`.

        Raises:
            ValueError: it is no drafter's.
            FileNotFoundError: a file is missing.
        """
        hub = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
        raw = read_config(path, **hub)
        if deepseek_v4.holds_drafter(raw):
            return cls._embedded(path, raw, hub, kwargs)
        if raw.get("model_type") == DSparkConfig.model_type:
            name, evidence = "canonical", f"model_type {raw['model_type']}"
        else:
            try:
                family = family_of(raw)
            except NotImplementedError as error:
                kind = other_kind(raw)
                name, reason = kind if kind else ("unknown", str(error))
                return cls(str(path), name, f"architectures {raw.get('architectures')}", f"cannot run yet: {reason}")
            name, evidence = family.name, family.recognises(raw)
        try:
            drafter = DSparkDrafter.from_pretrained(path, **kwargs)
        except (ValueError, NotImplementedError) as error:
            return cls(str(path), name, evidence, problem=str(error).removeprefix(f"{path}: "))
        folder = local_folder(path, **hub)
        tensors, state = read_tensors(folder), drafter.state_dict()
        needed = canonical_names(tensors)
        used = {id(tensor) for name, tensor in needed.items() if name in state or name not in _OPTIONAL}
        return cls(
            str(path),
            name,
            evidence,
            config=drafter.config,
            target_name=_target_name(raw, folder),
            dtypes=sorted({str(t.dtype).removeprefix("torch.") for t in tensors.values() if t.is_floating_point()}),
            parameters=sum(tensor.numel() for tensor in drafter.parameters()),
            bytes_in_file=sum(tensor.nbytes for tensor in tensors.values()),
            bytes_kept=sum(tensor.nbytes for tensor in state.values()),
            left_out=sorted(name for name, tensor in tensors.items() if id(tensor) not in used),
        )

    @classmethod
    def _embedded(
        cls, path: str | os.PathLike[str], raw: dict[str, Any], hub: dict[str, Any], kwargs: dict[str, Any]
    ) -> Inspection:
        """By configuration and headers alone: the tensors may be many gigabytes."""
        layout = kwargs.get("sample_from_anchor")
        try:
            found = deepseek_v4.Embedded.find(path, raw, dtype=kwargs.get("dtype"), sample_from_anchor=layout, **hub)
            with torch.device("meta"):
                parameters = sum(parameter.numel() for parameter in DSparkDrafter(found.config).parameters())
        except ValueError as error:
            return cls(str(path), deepseek_v4.NAME, deepseek_v4.EVIDENCE, problem=str(error))
        return cls(
            str(path),
            deepseek_v4.NAME,
            deepseek_v4.EVIDENCE,
            config=found.config,
            target_name=str(path),
            dtypes=sorted({str(piece.dtype).removeprefix("torch.") for piece in found.slices}),
            parameters=parameters,
            bytes_in_file=found.plan.bytes_read,
            bytes_kept=found.plan.bytes_in_memory,
            plan=str(found.plan),
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON can hold it."""
        shown = {name: getattr(self, name) for name in ("path", "family", "recognised_by", "problem")}
        config = self.config
        if config is None:
            return shown
        return shown | {
            "layout": {
                "name": "A, anchor first" if config.sample_from_anchor else "F, filler",
                "sample_from_anchor": config.sample_from_anchor,
                "source": config.layout_source,
            },
            "block_size": config.block_size,
            "drafted_tokens": config.num_draft_tokens,
            "taps": list(config.target_layer_ids),
            "mask_token_id": config.mask_token_id,
            "backbone": {
                "type": config.backbone_type,
                "layers": config.num_hidden_layers,
                "hidden_size": config.hidden_size,
                "layer_types": config.layer_types,
                "causal_layer_types": config.causal_layer_types,
                "sliding_window": config.sliding_window,
                "sliding_window_from": config.sliding_window_from if SLIDING in config.layer_types else None,
                "attention_sinks": config.has_attention_sinks,
            },
            "heads": {
                "markov": config.markov_head_type if config.markov_rank else None,
                "markov_rank": config.markov_rank,
                "confidence": config.enable_confidence_head,
                "confidence_with_markov": config.confidence_head_with_markov,
                "calibrated": config.confidence_temperatures is not None,
            },
            "vocabulary": {"size": config.vocab_size, "proposed": config.draft_vocab_size},
            "embedding": "its own" if config.own_embeddings else "the target's",
            "head": "its own" if config.own_head else "the target's",
            "size": {
                "dtypes": self.dtypes,
                "parameters": self.parameters,
                "bytes_in_file": self.bytes_in_file,
                "bytes_kept": self.bytes_kept,
            },
            "left_out": self.left_out,
            "plan": self.plan,
            "target": {
                "name": self.target_name,
                "hidden_size": config.target_hidden_size,
                "vocab_size": config.vocab_size,
                "layers": config.num_target_layers,
                "layers_at_least": max(config.target_layer_ids) + 1,
            },
        }


def _target_name(raw: dict[str, Any], folder: Path) -> str | None:
    """From the configuration, else from the model card."""
    named = ((raw.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    card = folder / "README.md"
    if named is None and card.exists():
        named = ModelCard.load(card, ignore_metadata_errors=True).data.base_model
    return ", ".join(named) if isinstance(named, list) else named


__all__ = ["Inspection"]
