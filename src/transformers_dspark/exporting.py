"""Writes a drafter as another project publishes its own, so that the engines that serve those serve it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from transformers import PreTrainedModel

from .borrowed_dspark import Borrowed
from .checkpoints.forms import FORMS
from .checkpoints.tensors import EMBEDDING, HEAD
from .modeling_dspark import DSparkDrafter


CANONICAL = "canonical"


def export_drafter(
    drafter: DSparkDrafter, folder: str | os.PathLike[str], form: str, target: PreTrainedModel | None = None
) -> None:
    """
    Opened again, the folder drafts the same tokens from the same logits.

    Args:
        drafter (`DSparkDrafter`): It is written in its dtype. An embedding and head of its own are written with it.
        folder (`str` or `os.PathLike`): Where to; made if need be.
        form (`str`): `"deepspec"`, `"specforge"`, `"speculators"` or `"canonical"`.
        target (`PreTrainedModel`, *optional*): Its target, whose embedding and head, or the head's rows for a reduced
            vocabulary, are written where the drafter has none of its own. Some engines want them in the file.

    Raises:
        ValueError: the form is unknown, or the drafter does not fit the target.
        NotImplementedError: the form cannot say something about this drafter or its target.
    """
    if form == CANONICAL:
        if target is not None:
            raise ValueError("The canonical form borrows the target's embedding and head: leave the target out.")
        return drafter.save_pretrained(folder)
    if form not in FORMS:
        raise ValueError(f"form={form!r} must be one of {', '.join((*FORMS, CANONICAL))}.")
    config, state = drafter.config, drafter.state_dict()
    raw = FORMS[form].config(config, drafter.dtype)
    if target is not None:
        state = _tensors_of(target, drafter) | state
        if form == "speculators":
            raw["speculators_config"]["verifier"] = {
                "name_or_path": target.name_or_path,
                "architectures": [type(target).__name__],
            }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # clones: two names of one tensor would be saved under one of them
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in FORMS[form].tensors(config, state).items()}
    save_torch_state_dict(tensors, folder)
    (folder / "config.json").write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return None


def _tensors_of(target: PreTrainedModel, drafter: DSparkDrafter) -> dict[str, torch.Tensor]:
    """The target's embedding and head in the drafter's dtype, as files hold them: plain tables."""
    drafter.check_target(target)
    config, parts = drafter.config, Borrowed.of(target)
    weight, bias = parts.head_tensors()
    ids = torch.arange(min(16, config.vocab_size))
    scale = config.hidden_size**0.5 if config.backbone_type == "gemma4" else 1.0
    softcap = config.final_logit_softcapping if config.backbone_type == "gemma4" else None
    with torch.no_grad():
        scaled, table = parts.embed(ids, raw=False), parts.embed(ids, raw=True)
        problems = [] if torch.allclose(scaled, table * scale, rtol=1e-2) else ["a scale or norm behind the embedding"]
    if parts.logit_factor != 1.0 or parts.softcap != softcap or bias is not None:
        problems.append("a scale, softcap or bias on the logits")
    if problems:
        raise NotImplementedError(
            f"{type(target).__name__} has {' and '.join(problems)}, for which the file has no field: export without "
            "its embedding and head."
        )
    rows = weight[drafter.draft_vocabulary().to(weight.device)] if config.has_reduced_vocabulary else weight
    tables = {EMBEDDING: parts.embedding.weight, HEAD: rows[: config.draft_vocab_size]}
    return {name: table[: config.vocab_size].to(drafter.dtype) for name, table in tables.items()}


__all__ = ["CANONICAL", "export_drafter"]
