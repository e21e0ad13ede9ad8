"""The drafter out of its target's checkpoint: what is read, what the numbers become, what is refused."""

import json
import logging
import struct
import threading
from pathlib import Path

import pytest
import torch
from transformers import DeepseekV4ForCausalLM, FineGrainedFP8Config

from tests.deepseek_v4.tiny import (
    DRAFTER,
    EXPERTS,
    HIDDEN,
    KINDS,
    quantized,
    stage_tensors,
    target_config,
    tiny_target,
    write_checkpoint,
)
from transformers_dspark import DSparkConfig, DSparkDrafter
from transformers_dspark.checkpoints import open_checkpoint
from transformers_dspark.checkpoints.deepseek_v4 import Embedded
from transformers_dspark.checkpoints.dequantize import dequantized
from transformers_dspark.exporting import export_drafter


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("official") / "checkpoint")


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def bytes_read(call) -> int:
    """What the calling thread asked the system for; mapped files would not count, but none is mapped here."""
    file = Path(f"/proc/self/task/{threading.get_native_id()}/io")
    before = file.read_text()
    call()
    counts = [int(text.split("rchar:")[1].split()[0]) for text in (before, file.read_text())]
    return counts[1] - counts[0] - len(before)


def header_size(file: Path) -> int:
    return 8 + struct.unpack("<Q", file.open("rb").read(8))[0]


def test_only_the_drafters_bytes_are_read(checkpoint):
    """The counter sees the configuration, the index, two headers and the drafter's tensors, and the third file not."""
    open_checkpoint(checkpoint)  # what is imported on first use is not counted
    raw = json.loads((checkpoint / "config.json").read_text())
    plan = Embedded.find(checkpoint, raw).plan
    files = sorted(checkpoint.glob("*.safetensors"))
    tensors = sum(tensor.nbytes for tensor in quantized(stage_tensors()).values())
    small = sum((checkpoint / name).stat().st_size for name in ("config.json", "model.safetensors.index.json"))
    counted = bytes_read(lambda: open_checkpoint(checkpoint))
    assert plan.bytes_read == tensors
    assert plan.files == 2
    assert 0 <= counted - tensors - sum(map(header_size, files[1:])) <= 4 * small
    assert counted < plan.bytes_of_checkpoint / 4


def test_a_shard_without_drafter_tensors_need_not_be_there(checkpoint, tmp_path):
    for file in checkpoint.iterdir():
        if "00001" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    assert DSparkDrafter.from_pretrained(tmp_path).config.num_hidden_layers == 3


def test_the_plan_is_said_before_loading_and_is_right(checkpoint, caplog):
    logger = logging.getLogger("transformers_dspark")
    logger.addHandler(caplog.handler)
    drafter = DSparkDrafter.from_pretrained(checkpoint, device_map="auto")
    logger.removeHandler(caplog.handler)
    plan = Embedded.find(checkpoint, json.loads((checkpoint / "config.json").read_text())).plan
    bias = drafter.confidence_head.proj.bias
    assert plan.bytes_in_memory == sum(tensor.nbytes for tensor in drafter.state_dict().values()) - bias.nbytes
    assert not bias.any()
    said = [record.getMessage() for record in caplog.records]
    assert any(str(plan) in message and "in 2 files" in message for message in said), said
    assert drafter.dtype == torch.bfloat16
    exact = {name for name, p in drafter.named_parameters() if p.dtype == torch.float32}
    assert {"layers.0.attn_hc.fn", "layers.2.self_attn.sinks", "hc_head.hc_fn", "norm.weight"} <= exact
    assert not [name for name in exact if "proj" in name]


@torch.no_grad()
def test_every_number_is_the_one_that_transformers_reads(tmp_path):
    """
    The same stages written as layers of a target, which Transformers opens with its own names, its own stacking of
    experts and its own unpacking.
    """
    tensors = quantized(stage_tensors())
    drafter = DSparkDrafter.from_pretrained(write_checkpoint(tmp_path / "inside", tensors), dtype=torch.float32)
    layers = {f"layers.{name}": t for name, t in tensors.items() if not name.startswith(("0.main", "2.norm"))}
    once = {name: layers.pop(name) for name in list(layers) if "head" in name}
    layers |= {name.replace("layers.2.", ""): tensor for name, tensor in once.items() if "hc_head" in name}
    layers |= {"embed.weight": torch.randn(97, HIDDEN), "head.weight": torch.randn(97, HIDDEN)}
    layers["norm.weight"] = tensors["2.norm.weight"]
    from safetensors.torch import save_file

    folder = tmp_path / "as layers"
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in layers.items()}, folder / "model.safetensors")
    config = target_config(num_hidden_layers=3, layer_types=["sliding_attention"] * 3, mlp_layer_types=["moe"] * 3)
    raw = config.to_dict() | {
        "quantization_config": {"quant_method": "fp8", "scale_fmt": "ue8m0", "expert_dtype": "fp4"},
        "architectures": ["DeepseekV4ForCausalLM"],
    }
    (folder / "config.json").write_text(json.dumps(raw))
    theirs = DeepseekV4ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    wanted, got = theirs.model.state_dict(), drafter.state_dict()
    same = [name for name in got if name.startswith(("layers.", "norm", "hc_head"))]
    assert len(same) > 70
    for name in same:
        torch.testing.assert_close(got[name], wanted[name].to(got[name].dtype), rtol=0, atol=0, msg=name)


def test_blocks_that_the_end_cuts():
    random = torch.Generator().manual_seed(0)
    packed = torch.randn(150, 260, generator=random).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 2.0, 0.5], [0.25, 4.0, 8.0]])
    for given in (scales, scales.to(torch.float8_e8m0fnu), scales.to(torch.float8_e8m0fnu).view(torch.uint8)):
        whole = dequantized(packed, given, torch.float32)
        for row, column in ((0, 0), (127, 128), (128, 127), (149, 259)):
            assert whole[row, column] == packed.float()[row, column] * scales[row // 128, column // 128]
    with pytest.raises(ValueError, match=r"do not fit \(150, 260\) numbers in blocks of 128 x 128"):
        dequantized(packed, scales[:1], torch.float32)


@torch.no_grad()
def test_saved_and_opened_again_it_drafts_the_same(checkpoint, target, tmp_path):
    drafter = DSparkDrafter.from_target(target, checkpoint)
    assert drafter.dtype == target.dtype
    assert DRAFTER["dspark_block_size"] == drafter.config.num_draft_tokens
    assert drafter.config.backbone_config["n_routed_experts"] == EXPERTS
    drafter.save_pretrained(tmp_path / "canonical")
    again = DSparkDrafter.from_pretrained(tmp_path / "canonical").bind_target(target)
    assert isinstance(again.config, DSparkConfig)
    assert (tmp_path / "canonical" / "sparse_dspark.py").exists()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    proposals = []
    for one in (drafter, again):
        context = one.new_context()
        one.extend_context(context, torch.ones(1, 11, 3 * HIDDEN), torch.arange(11)[None])
        proposals.append(one.propose(torch.tensor([5]), torch.tensor([11]), context))
    # the same bits in another place of memory: sums may be formed in another order
    torch.testing.assert_close(proposals[0].logits, proposals[1].logits)
    torch.testing.assert_close(proposals[0].confidence, proposals[1].confidence)


@torch.no_grad()
def test_shorter_blocks(checkpoint, target):
    short = DSparkDrafter.from_target(target, checkpoint, block_size=3)
    context = short.new_context()
    short.extend_context(context, torch.ones(1, 11, 3 * HIDDEN), torch.arange(11)[None])
    assert short.propose(torch.tensor([5]), torch.tensor([11]), context).tokens.shape == (1, 3)
    assert short.config.num_draft_tokens == 3
    for wrong in (0, 6, True):
        with pytest.raises(ValueError, match=rf"block_size={wrong} must lie in 1\.\.5"):
            DSparkDrafter.from_target(target, checkpoint, block_size=wrong)


@torch.no_grad()
def test_taps_are_means_over_the_streams(target):
    """Of a layer in the middle, of the last one before the final norm, and of the embedding."""
    from transformers_dspark.target import TargetTaps

    ids, kept = torch.randint(0, 90, (2, 7)), {}
    last = len(KINDS) - 1
    hooks = [
        target.model.layers[layer].register_forward_hook(lambda m, a, out, layer=layer: kept.update({layer: out}))
        for layer in (1, last)
    ]
    with TargetTaps(target, [1, last, -1]) as taps:
        read = taps.read(taps.run(ids, **taps.forward_kwargs), torch.device("cpu"), torch.float32)
    for hook in hooks:
        hook.remove()
    wanted = [kept[1].mean(dim=2), kept[last].mean(dim=2), target.model.embed_tokens(ids)]
    torch.testing.assert_close(read, torch.cat(wanted, dim=-1))


@pytest.mark.parametrize("form", ["deepspec", "specforge", "speculators"])
def test_other_projects_have_no_words_for_it(form, checkpoint, tmp_path):
    drafter = DSparkDrafter.from_pretrained(checkpoint)
    with pytest.raises(NotImplementedError, match="it has no backbone_type='deepseek_v4'; it has no attention sinks"):
        export_drafter(drafter, tmp_path / form, form)
    assert not (tmp_path / form).exists()


def without(*names):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


BROKEN = {
    "no tensors": ({}, lambda tensors: {"0.x": torch.ones(1)}, "missing: mtp.0.ffn.experts.0.w1.weight"),
    "a lost expert": ({}, without("1.ffn.experts.2.w3.weight"), r"missing: mtp\.1\.ffn\.experts\.2\.w3\.weight\.$"),
    "a lost scale": ({}, without("1.attn.wkv.scale"), "mtp.1.attn.wkv.weight holds torch.float8_e4m3fn but"),
    "a lost weight": ({}, without("1.attn.wkv.weight"), "scales without their weight: mtp.1.attn.wkv.scale"),
    "a lost norm": ({}, without("2.norm.weight"), "missing: norm.weight"),
    "a lost stage": (
        {},
        lambda tensors: {name: t for name, t in tensors.items() if name[0] != "1"},
        r"stages \[0, 2\], which are not all from 0 on",
    ),
    "another tensor": (
        {},
        lambda tensors: tensors | {"0.odd.weight": torch.ones(2, 2)},
        "unexpected: mtp.0.odd.weight",
    ),
    "fewer experts": ({"n_routed_experts": 3}, None, "is beyond the 3 experts"),
    "no taps": ({"dspark_target_layer_ids": ...}, None, "lacks dspark_target_layer_ids"),
    "words for numbers": ({"dspark_block_size": "five"}, None, "block_size='five' must be a whole number"),
    "more taps than columns": ({"dspark_target_layer_ids": [1, 2]}, None, "fc.weight has shape"),
    "other widths": ({"moe_intermediate_size": 32}, None, "instead of"),
    "two shared experts": ({"n_shared_experts": 2}, None, "n_shared_experts=2 must be 1"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_checkpoints_say_what_is_wrong(case, tmp_path):
    raw, change, message = BROKEN[case]
    tensors = quantized(stage_tensors())
    path = write_checkpoint(tmp_path / "c", tensors if change is None else change(tensors), **raw)
    with pytest.raises(ValueError, match=message) as error:
        DSparkDrafter.from_pretrained(path)
    assert str(path) in str(error.value) or "DSparkConfig" in str(error.value)


def test_a_file_that_ends_early(checkpoint, tmp_path):
    for file in checkpoint.iterdir():
        content = file.read_bytes()
        (tmp_path / file.name).write_bytes(content[:-5000] if "00003-of" in file.name else content)
    with pytest.raises(ValueError, match=r"00003-of-00003\.safetensors ends inside mtp"):
        DSparkDrafter.from_pretrained(tmp_path)


def test_what_cannot_be_kept(checkpoint):
    with pytest.raises(NotImplementedError, match="cannot be kept quantized"):
        DSparkDrafter.from_pretrained(checkpoint, quantization_config=FineGrainedFP8Config())
    with pytest.raises(ValueError, match="has no embedding of its own"):
        DSparkDrafter.from_pretrained(checkpoint, own_embeddings=True)
