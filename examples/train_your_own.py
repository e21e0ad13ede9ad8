"""
From a target's id to a calibrated, exported drafter: prompts, answers, training, calibration, evaluation, export.

    python examples/train_your_own.py --target HuggingFaceTB/SmolLM2-135M-Instruct --out my-drafter
    python examples/train_your_own.py --tiny --out tiny-drafter      # a made-up target on a CPU, about a minute

Each step is a command of `dspark`, and is printed before it runs. A step whose result is there is left out, so a
stopped run goes on where it was.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from transformers_dspark.cli import main as dspark


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--target", help="folder or hub id of a chat model")
    parser.add_argument("--out", type=Path, required=True, help="folder for everything that is made")
    parser.add_argument("--prompts", type=int, default=20_000, help="prompts to make (default: %(default)s)")
    parser.add_argument("--epochs", type=float, default=10, help="passes over the answers (default: %(default)s)")
    parser.add_argument("--tokens-per-second", type=float, help="of the machine's training, for the estimate of time")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    parser.add_argument("--tiny", action="store_true", help="a made-up target and sizes for a CPU")
    parser.add_argument("--yes", action="store_true", help="do not ask after the estimate")
    args = parser.parse_args(words)
    if args.tiny == bool(args.target):
        parser.error("give either --target or --tiny")
    args.out.mkdir(parents=True, exist_ok=True)
    target = str(tiny_target(args.out / "target")) if args.tiny else args.target
    out, device = args.out, ["--device", args.device] if args.device else []
    shape = ["--num-layers", "1", "--block-size", "4", "--markov-rank", "8"] if args.tiny else []
    budget = ["--tokens-per-batch", "1024", "--anchors", "8", "--max-length", "96"] if args.tiny else []
    slots = ["--slots", "8", "--capacity", "96"] if args.tiny else []
    count, epochs = ("24", "1") if args.tiny else (str(args.prompts), str(args.epochs))
    held_out = out / "held_out.jsonl"

    step(out / "all.jsonl", ["data", "prompts", "--count", count, "--out", f"{out}/all.jsonl"])
    hold_out(out / "all.jsonl", out / "prompts.jsonl", held_out, 8 if args.tiny else 64)
    step(out / "answers" / "index.json", [
        "data", "answers", "--target", target, "--prompts", f"{out}/prompts.jsonl", "--out", f"{out}/answers",
        *slots, *device,
    ])  # fmt: skip
    if not (out / "drafter" / "config.json").exists() and not agreed(args, target):
        return 1
    step(out / "drafter" / "config.json", [
        "train", "--target", target, "--answers", f"{out}/answers", "--out", f"{out}/drafter", "--epochs", epochs,
        *shape, *budget, *device,
    ])  # fmt: skip
    pair = ["--target", target, "--drafter", f"{out}/drafter", *device]
    tokens = ["--max-new-tokens", "16" if args.tiny else "256"]
    step(out / "calibration.json", [
        "calibrate", str(held_out), *pair, *tokens, "--store", "--json", f"{out}/calibration.json",
    ])  # fmt: skip
    step(out / "eval.json", ["eval", str(held_out), *pair, *tokens, "--json", f"{out}/eval.json"])
    step(out / "exported" / "config.json", ["export", f"{out}/drafter", f"{out}/exported", "--to", "deepspec"])
    print(f"drafter in {out}/drafter, figures in {out}/eval.json, another project's form in {out}/exported")
    return 0


def step(result: Path, command: list[str]) -> None:
    """Runs a command of `dspark` unless its result is there."""
    if result.exists():
        return
    print("$ dspark", shlex.join(command), flush=True)
    if code := dspark(command):
        raise SystemExit(code)


def hold_out(everything: Path, prompts: Path, held_out: Path, count: int) -> None:
    """Keeps the last prompts aside for calibration and figures."""
    lines = everything.read_text(encoding="utf-8").splitlines(keepends=True)
    prompts.write_text("".join(lines[:-count]), encoding="utf-8")
    held_out.write_text("".join(lines[-count:]), encoding="utf-8")


def agreed(args: argparse.Namespace, target: str) -> bool:
    """Says what training will take, and asks whether it may."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from transformers_dspark.training import DrafterShape
    from transformers_dspark.training.estimates import estimate_training
    from transformers_dspark.training.fresh import drafter_config

    cuda = torch.cuda.is_available() and args.device != "cpu"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(target), dtype=torch.bfloat16 if cuda else torch.float32
        )
    size = {"num_layers": 1, "block_size": 4, "markov_rank": 8} if args.tiny else {}
    rows, length, anchors = (10, 96, 8) if args.tiny else (32, 1024, 64)
    shape = drafter_config(model, DrafterShape(**size))
    estimate = estimate_training(model, shape, rows=rows, length=length, anchors=anchors)
    # a third of the rate of matrix products of a large GPU; a CPU has about a hundredth of that
    rate = 2e14 if cuda else 5e10
    if args.tokens_per_second:
        rate = args.tokens_per_second * estimate.flops / estimate.tokens
    answered = 24 if args.tiny else args.prompts
    steps = max(1, round((1 if args.tiny else args.epochs) * answered * length / 2 / estimate.tokens))
    print(estimate.describe(steps, rate))
    return args.yes or args.tiny or input("Go on? [y/N] ").strip().lower() in ("y", "yes")


def tiny_target(folder: Path) -> Path:
    """A made-up chat model of random weights over bytes, for a run that shows the steps and nothing else."""
    if (folder / "config.json").exists():
        return folder
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.chat_template = "{% for message in messages %}{{ message['content'][:24] }}\n{% endfor %}"
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=None, eos_token_id=1, max_position_embeddings=256,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    sys.exit(main())
