"""Reads a folder of golden data: a target, a drafter in the official layout, what the official code made of them."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from transformers_dspark import DSparkDrafter


DATA = Path(__file__).parent / "data" / "deepspec"
FAMILIES = Path(__file__).parent / "data" / "families"
FOLDERS = sorted(path for path in DATA.iterdir() if path.is_dir())
WITH_TARGET = [path for path in FOLDERS if (path / "target").is_dir()]
EMBEDDINGS = ("embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class Golden:
    facts: dict
    tensors: dict[str, torch.Tensor]
    target: PreTrainedModel | None

    def drafter(self, folder: Path, own_embeddings: bool) -> DSparkDrafter:
        drafter = DSparkDrafter.from_pretrained(folder, own_embeddings=own_embeddings)
        return drafter if own_embeddings else drafter.bind_target(self.target)

    def rounds(self):
        """Yields the prompt's number, the key and the facts of each round of which tensors are stored."""
        for number, prompt in enumerate(self.facts["prompts"]):
            for index, facts in enumerate(prompt["rounds"]):
                if f"p{number}.r{index}.draft_ids" in self.tensors:
                    yield number, f"p{number}.r{index}.", facts


def read(folder: Path) -> Golden:
    target = AutoModelForCausalLM.from_pretrained(folder / "target") if (folder / "target").is_dir() else None
    return Golden(json.loads((folder / "golden.json").read_text()), load_file(folder / "golden.safetensors"), target)


def with_embeddings(folder: Path, golden: Golden, copy: Path) -> Path:
    """The drafter with its own embedding and head in the file: the official ones are copies of the target's."""
    tensors = load_file(folder / "drafter" / "model.safetensors")
    if EMBEDDINGS[0] not in tensors:
        modules = golden.target.get_input_embeddings(), golden.target.get_output_embeddings()
        tensors |= {name: m.weight.detach().clone() for name, m in zip(EMBEDDINGS, modules, strict=True)}
    copy.mkdir(exist_ok=True)
    shutil.copyfile(folder / "drafter" / "config.json", copy / "config.json")
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-4) -> bool:
    return bool((ours - theirs).norm() <= tolerance * theirs.norm())
