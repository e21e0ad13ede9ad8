"""Published drafter families: each module recognises one by content and turns it into canonical config and tensors."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import PreTrainedConfig

from ..configuration_dspark import mistyped
from .deepseek_v4 import NAME as EMBEDDED
from .deepseek_v4 import holds_drafter, open_embedded
from .deepspec import DEEPSPEC, NEMOTRON
from .dflash import DFLASH, LFM2, SPECFORGE
from .family import Family, convert
from .files import OpenedCheckpoint, local_folder, read_tensors, shard_names
from .muse import MUSE
from .speculators import SPECULATORS
from .unsupported import other_kind


HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
FAMILIES = (SPECULATORS, MUSE, SPECFORGE, LFM2, NEMOTRON, DFLASH, DEEPSPEC)  # asked in this order
# fields that tell the families apart or hold the others
RECOGNISED_BY = (
    "architectures", "text_config", "dspark_config", "dflash_config", "speculators_config", "transformer_layer_config",
)  # fmt: skip


def family_of(raw: dict[str, Any]) -> Family:
    """
    The family of a configuration, by its content.

    Raises:
        ValueError: it is no drafter's.
        NotImplementedError: it is a drafter's of a kind that cannot run yet.
    """
    names = ", ".join([*(family.name for family in FAMILIES), EMBEDDED])
    if problems := mistyped({name: raw.get(name) for name in RECOGNISED_BY}):
        raise ValueError(f"The configuration cannot be read: {'; '.join(problems)}.")
    if refusal := other_kind(raw):
        raise NotImplementedError(
            f"This drafter is of the family {refusal[0]}, which cannot run yet: {refusal[1]}. This version opens "
            f"canonical DSpark checkpoints and {names}."
        )
    for family in FAMILIES:
        if family.recognises(raw):
            return family
    raise ValueError(
        f"This is not a drafter: model_type={raw.get('model_type')!r}, architectures={raw.get('architectures')}. "
        f"This version opens canonical DSpark checkpoints and {names}."
    )


def read_config(path: str | os.PathLike[str], **hub: Any) -> dict[str, Any]:
    """
    The configuration as it stands in a folder or Hub repository.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it holds no object of fields.
    """
    try:
        raw, _ = PreTrainedConfig.get_config_dict(path, **hub)
    except (AttributeError, KeyError, TypeError):
        raw = None
    if not isinstance(raw, dict):
        raise ValueError(f"The config.json of {path} must hold an object of fields; fetch it again.")
    if not raw:  # what Transformers makes of a folder without the file
        raise FileNotFoundError(f"{path} holds no config.json; a drafter needs its configuration.")
    return raw


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    own_embeddings: bool = False,
    sample_from_anchor: bool | None = None,
    **kwargs: Any,
) -> OpenedCheckpoint | None:
    """
    Recognises a checkpoint by its configuration's content, never by its name.

    Returns:
        `OpenedCheckpoint`, or `None` when it is canonical and Transformers can open it as it is.

    Raises:
        ValueError: not a drafter of a known family, or a damaged one.
        NotImplementedError: a known family, or an option of one, that cannot run yet.
    """
    hub = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
    raw = read_config(path, **hub)
    if raw.get("model_type") == "dspark":
        if os.path.isdir(path):
            shard_names(local_folder(path, **hub))
        return None
    dtype = kwargs.get("dtype", kwargs.get("torch_dtype"))
    try:
        if holds_drafter(raw):
            if own_embeddings:
                raise ValueError("own_embeddings=True, but a drafter inside its target has no embedding of its own.")
            if kwargs.get("quantization_config") is not None:
                raise NotImplementedError(
                    "the drafter inside DeepSeek-V4 cannot be kept quantized, since Transformers' fp8 and fp4 layers "
                    "do not know it: leave quantization_config out, and its weights become floating point on loading."
                )
            return open_embedded(path, raw, dtype=dtype, sample_from_anchor=sample_from_anchor, **hub)
        family = family_of(raw)
        tensors = read_tensors(local_folder(path, **hub))
        opened = convert(family, raw, tensors, own_embeddings=own_embeddings, sample_from_anchor=sample_from_anchor)
        del tensors  # what the drafter does not keep
    except NotImplementedError as error:
        raise NotImplementedError(f"{path}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    _cast(opened.tensors, dtype)
    return opened


def _cast(tensors: dict[str, torch.Tensor], dtype: Any) -> None:
    """Casts one tensor after another, so that the file's and the drafter's are never in memory together."""
    dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if isinstance(dtype, torch.dtype):
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                tensors[name] = tensor.to(dtype)
            del tensor  # or its pages would stay until the next is there


__all__ = ["FAMILIES", "OpenedCheckpoint", "family_of", "open_checkpoint", "read_config"]
