"""Published drafter families: each module recognises one by content and turns it into canonical config and tensors."""

from __future__ import annotations

import os
from typing import Any

from transformers import PreTrainedConfig

from ..configuration_dspark import mistyped
from . import deepspec
from .files import OpenedCheckpoint, local_folder, read_tensors, shard_names
from .unsupported import family_of


HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
# fields that tell the families apart or hold the others
RECOGNISED_BY = ("architectures", "text_config", "dspark_config", "dflash_config", "speculators_config")


def open_checkpoint(
    path: str | os.PathLike[str], *, own_embeddings: bool = False, **kwargs: Any
) -> OpenedCheckpoint | None:
    """
    Recognises a checkpoint by its configuration's content, never by its name.

    Returns:
        `OpenedCheckpoint`, or `None` when it is canonical and Transformers can open it as it is.

    Raises:
        ValueError: not a drafter of a known family.
        NotImplementedError: a known family, or an option of one, that cannot run yet.
    """
    hub = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
    try:
        raw, _ = PreTrainedConfig.get_config_dict(path, **hub)
    except (AttributeError, KeyError, TypeError):
        raw = None
    if not isinstance(raw, dict):
        raise ValueError(f"The config.json of {path} must hold an object of fields; fetch it again.")
    if not raw:  # what Transformers makes of a folder without the file
        raise FileNotFoundError(f"{path} holds no config.json; a drafter needs its configuration.")
    if problems := mistyped({name: raw.get(name) for name in RECOGNISED_BY}):
        raise ValueError(f"The configuration of {path} cannot be read: {'; '.join(problems)}.")
    if raw.get("model_type") == "dspark":
        if os.path.isdir(path):
            shard_names(local_folder(path, **hub))
        return None
    if deepspec.recognises(raw):
        return deepspec.convert(raw, read_tensors(local_folder(path, **hub)), own_embeddings=own_embeddings)
    opens = f"canonical DSpark checkpoints and the official DeepSpec ones ({', '.join(deepspec.ARCHITECTURES)})"
    if family := family_of(raw):
        raise NotImplementedError(
            f"{path} is of the family {family}, which cannot run yet; this version opens {opens}."
        )
    raise ValueError(
        f"{path} is not a drafter: model_type={raw.get('model_type')!r}, architectures={raw.get('architectures')}. "
        f"This version opens {opens}."
    )


__all__ = ["OpenedCheckpoint", "open_checkpoint"]
