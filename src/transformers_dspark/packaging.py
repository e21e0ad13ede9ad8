"""What a repository of a drafter holds beside its weights: the public door of `generate`, options, and a card."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import GENERATION_CONFIG_NAME

from .checkpoints import HUB_ARGUMENTS
from .configuration_dspark import DSparkConfig
from .generation_config import DSparkGenerationConfig


DOOR = "custom_generate"
# the releases whose private names that code uses
TRANSFORMERS = "transformers>=5.24,<6"
TAGS = ("speculative-decoding", "dspark")
_CARD = Template("""\
---
library_name: transformers
pipeline_tag: text-generation
${base_model}tags:
${tags}
${model_index}---

# A DSpark drafter${of_target}

It drafts $drafted tokens at a time; the target checks them in one step, and the text is the one that it would have
written alone.

```python
import transformers_dspark
from transformers import AutoModelForCausalLM
from transformers_dspark import DSparkDrafter

target = AutoModelForCausalLM.from_pretrained("$target", dtype="auto")
drafter = DSparkDrafter.from_pretrained("$repository", dtype=target.dtype)
out = target.generate(**inputs, assistant_model=drafter, max_new_tokens=256)
```

Or with nothing installed but Transformers, for one prompt at a time:

```python
drafter = AutoModel.from_pretrained("$repository", trust_remote_code=True, dtype=target.dtype)
out = target.generate(**inputs, custom_generate="$repository", trust_remote_code=True, assistant_model=drafter)
```
$accepted
## What it is

| | |
|---|---|
| backbone | $backbone, $layers layers, hidden $hidden |
| layout | $layout, a block of $block rows |
| taps | outputs of target layers $taps |
| sequential head | $markov |
| confidence head | $confidence |
| proposals | $proposed of $vocabulary tokens |
""")


def write_door(folder: str | os.PathLike[str]) -> None:
    """
    Writes `custom_generate/` into a folder, so that `generate(custom_generate=folder)` finds it: the door, and the
    code that it runs where the package is not installed.
    """
    door, source = Path(folder) / DOOR, Path(__file__).with_name("generate_dspark.py")
    door.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, door / "generate.py")
    for file in get_relative_import_files(source):
        shutil.copyfile(file, door / Path(file).name)
    (door / "requirements.txt").write_text(f"{TRANSFORMERS}\n")


def write_repository(
    drafter: Any,
    folder: str | os.PathLike[str],
    *,
    repository: str | None = None,
    base_model: str | None = None,
    tokenizer: Any = None,
    results: Sequence[dict[str, Any]] = (),
) -> None:
    """
    Writes everything that a Hub repository of a drafter needs.

    Args:
        drafter (`DSparkDrafter`): The drafter.
        folder (`str` or `os.PathLike`): Where to.
        repository (`str`, *optional*): The name that the card's examples open. Defaults to the folder's.
        base_model (`str`, *optional*): Hub id of its target.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's. A pipeline that is given the repository's name
            as its assistant opens one there.
        results (`Sequence[dict]`): Accepted lengths for the card, the `results` of `dspark eval --json`.
    """
    drafter.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    card = model_card(drafter.config, repository or Path(folder).name, base_model, results)
    (Path(folder) / "README.md").write_text(card, encoding="utf-8")


def options_beside(path: str | os.PathLike[str], subfolder: str = "", **kwargs: Any) -> DSparkGenerationConfig | None:
    """
    The options saved beside a drafter's weights, or `None` if there are none.

    Args:
        path (`str` or `os.PathLike`): Folder or Hub repository.
        subfolder (`str`): Where in it.
        kwargs: Those of `from_pretrained`; the arguments that choose a file on the Hub are used.

    Raises:
        ValueError: an option out of range.
        OSError: the file is damaged.
    """
    file = Path(path, subfolder, GENERATION_CONFIG_NAME)
    if Path(path).is_dir():
        if not file.is_file():
            return None
    else:
        hub = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
        try:
            file = Path(hf_hub_download(str(path), GENERATION_CONFIG_NAME, subfolder=subfolder or None, **hub))
        except EntryNotFoundError:
            return None
    return DSparkGenerationConfig.from_pretrained(file.parent)


def model_card(
    config: DSparkConfig, repository: str, base_model: str | None = None, results: Sequence[dict[str, Any]] = ()
) -> str:
    """
    The card's text; every figure in it is the configuration's or one of the results.

    Args:
        config (`DSparkConfig`): The drafter's.
        repository (`str`): The name that its examples open.
        base_model (`str`, *optional*): Hub id of its target.
        results (`Sequence[dict]`): The `results` of `dspark eval --json`.
    """
    heads = f"{config.markov_head_type}, rank {config.markov_rank}" if config.markov_rank else "none"
    accepted = ""
    if results:
        accepted = (
            "\n## Accepted length\n\nCommitted tokens per round, the target's own token included.\n\n"
            f"{accepted_table(results, config.num_draft_tokens)}\n"
        )
    return _CARD.substitute(
        base_model=f"base_model: {base_model}\n" if base_model else "",
        of_target=f" for {base_model}" if base_model else "",
        tags="\n".join(f"- {tag}" for tag in TAGS),
        model_index=model_index(repository.rpartition("/")[2], results) + "\n" if results else "",
        target=base_model or "its target",
        repository=repository,
        accepted=accepted,
        drafted=config.num_draft_tokens,
        backbone=config.backbone_type,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        layout="A (anchor first)" if config.sample_from_anchor else "F (filler)",
        block=config.block_size,
        taps=", ".join(map(str, config.target_layer_ids)),
        markov=heads,
        confidence="yes" if config.enable_confidence_head else "none",
        proposed=f"{config.draft_vocab_size:,}",
        vocabulary=f"{config.vocab_size:,}",
    )


def accepted_table(results: Sequence[dict[str, Any]], drafted: int) -> str:
    """Accepted lengths and acceptance by position, of `drafted` positions, as a table."""
    head = ["prompts", "temperature", "answers", "accepted length", *(f"k={k + 1}" for k in range(drafted))]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for record in results:
        shares = ["-" if share is None else f"{share:.0%}" for share in record["acceptance_by_position"]]
        cells = [record["prompts"], f"{record['temperature']:g}", str(record["answers"])]
        lines.append("| " + " | ".join([*cells, f"{record['accepted_length']:.2f}", *shares]) + " |")
    return "\n".join(lines)


def model_index(name: str, results: Sequence[dict[str, Any]]) -> str:
    """Accepted lengths as the Hub's front matter has figures."""
    lines = ["model-index:", f"- name: {name}", "  results:"]
    for record in results:
        lines += [
            "  - task:",
            "      type: text-generation",
            "    dataset:",
            f"      name: {record['prompts']}, temperature {record['temperature']:g}",
            f"      type: {record['prompts']}",
            "    metrics:",
            "    - type: accepted_length",
            f"      value: {record['accepted_length']:.3f}",
        ]
    return "\n".join(lines)


__all__ = ["accepted_table", "model_card", "model_index", "options_beside", "write_door", "write_repository"]
