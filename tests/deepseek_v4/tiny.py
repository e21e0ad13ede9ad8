"""Tiny DeepSeek-V4 targets, and checkpoints with a drafter inside in the official names and number formats."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM


STAGES, EXPERTS, INNER, HIDDEN, VOCABULARY = 3, 4, 64, 64, 97
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INNER,
    "num_attention_heads": 4,
    "head_dim": 32,
    "q_lora_rank": 48,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 4,
    "o_groups": 2,
    "o_lora_rank": 24,
    "sliding_window": 8,
    "qk_rope_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.3,
}
KINDS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"]
DRAFTER = {
    "dspark_block_size": 5,
    "dspark_noise_token_id": 96,
    "dspark_target_layer_ids": [1, 2, 3],
    "dspark_markov_rank": 6,
}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0", "activation_scheme": "dynamic"}


def target_config(**changes) -> DeepseekV4Config:
    """All kinds of layers, a router by hash before three by scores."""
    return DeepseekV4Config(
        **SHAPE
        | {
            "num_hidden_layers": len(KINDS),
            "layer_types": KINDS,
            "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
            "compress_rate_hca": 16,
        }
        | changes
    )


def tiny_target(seed: int = 0, **changes) -> DeepseekV4ForCausalLM:
    torch.manual_seed(seed)
    target = DeepseekV4ForCausalLM(target_config(**changes)).eval()
    for layer in target.model.layers:
        if layer.mlp.is_hash:
            layer.mlp.gate.tid2eid.copy_(torch.randint(0, EXPERTS, layer.mlp.gate.tid2eid.shape))
    return target


def stage_tensors(seed: int = 1) -> dict[str, torch.Tensor]:
    """Everything of the three stages in float32, by its official name without the prefix `mtp.`."""
    random = torch.Generator().manual_seed(seed)
    heads, dim, streams = SHAPE["num_attention_heads"], SHAPE["head_dim"], SHAPE["hc_mult"]
    ranks, groups, lora, mixes = SHAPE["q_lora_rank"], SHAPE["o_groups"], SHAPE["o_lora_rank"], (2 + streams) * streams

    def rows(*shape: int, scale: float = 0.2) -> torch.Tensor:
        return torch.randn(*shape, generator=random) * scale

    def weights(size: int) -> torch.Tensor:
        return 1 + rows(size, scale=0.3)

    tensors = {
        "0.main_proj.weight": rows(HIDDEN, 3 * HIDDEN),
        "0.main_norm.weight": weights(HIDDEN),
        "2.norm.weight": weights(HIDDEN),
        "2.hc_head_fn": rows(streams, streams * HIDDEN),
        "2.hc_head_base": rows(streams),
        "2.hc_head_scale": weights(1),
        "2.markov_head.markov_w1.weight": rows(VOCABULARY, DRAFTER["dspark_markov_rank"], scale=0.5),
        "2.markov_head.markov_w2.weight": rows(VOCABULARY, DRAFTER["dspark_markov_rank"], scale=0.5),
        "2.confidence_head.proj.weight": rows(1, HIDDEN + DRAFTER["dspark_markov_rank"]),
    }
    for stage in range(STAGES):
        here = {
            "attn.wq_a.weight": rows(ranks, HIDDEN),
            "attn.q_norm.weight": weights(ranks),
            "attn.wq_b.weight": rows(heads * dim, ranks),
            "attn.wkv.weight": rows(dim, HIDDEN),
            "attn.kv_norm.weight": weights(dim),
            "attn.wo_a.weight": rows(groups * lora, heads * dim // groups),
            "attn.wo_b.weight": rows(HIDDEN, groups * lora),
            "attn.attn_sink": rows(heads, scale=1.0),
            "attn_norm.weight": weights(HIDDEN),
            "ffn_norm.weight": weights(HIDDEN),
            "ffn.gate.weight": rows(EXPERTS, HIDDEN),
            "ffn.gate.bias": rows(EXPERTS),
            **{f"ffn.shared_experts.w{part}.weight": rows(INNER, HIDDEN) for part in "13"},
            "ffn.shared_experts.w2.weight": rows(HIDDEN, INNER),
        }
        for expert in range(EXPERTS):
            here |= {f"ffn.experts.{expert}.w{part}.weight": rows(INNER, HIDDEN) for part in "13"}
            here[f"ffn.experts.{expert}.w2.weight"] = rows(HIDDEN, INNER)
        for part in ("attn", "ffn"):
            here |= {f"hc_{part}_fn": rows(mixes, streams * HIDDEN), f"hc_{part}_base": rows(mixes)}
            here[f"hc_{part}_scale"] = weights(3)
        tensors |= {f"{stage}.{name}": tensor for name, tensor in here.items()}
    return tensors


_LINEARS = ("main_proj", "attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_a", "attn.wo_b", "shared_experts.w")


def quantized(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As the official files hold them: float8 with a scale for 128 x 128, experts of four bits with one for 32."""
    packed = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if ".experts." in name:
            rows, columns = tensor.shape
            blocks = tensor.view(rows, -1, 32)
            scale = _power_of_two(blocks.abs().amax(dim=-1) / 6)
            table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
            magnitudes = (blocks / scale[..., None]).view(rows, columns)
            bits = (magnitudes.abs()[..., None] - table).abs().argmin(dim=-1) | ((magnitudes < 0).long() << 3)
            packed[name] = (bits[:, 0::2] | (bits[:, 1::2] << 4)).to(torch.uint8).view(torch.int8)
            packed[f"{stem}.scale"] = scale.to(torch.float8_e8m0fnu)
        elif any(part in name for part in _LINEARS):
            grid = [[block.abs().max() / 448 for block in band.split(128, dim=1)] for band in tensor.split(128, dim=0)]
            scale = _power_of_two(torch.tensor(grid))
            wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: tensor.shape[0], : tensor.shape[1]]
            packed[name] = (tensor / wide).to(torch.float8_e4m3fn)
            packed[f"{stem}.scale"] = scale.to(torch.float8_e8m0fnu)
        else:
            packed[name] = tensor.bfloat16() if "markov" in name or "gate.weight" in name else tensor
    return packed


def _power_of_two(scale: torch.Tensor) -> torch.Tensor:
    return torch.exp2(torch.ceil(torch.log2(scale)))


def write_checkpoint(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **raw) -> Path:
    """
    Three shards: one of the target alone, two that mix both. The target's own tensors are only ballast: what is
    read of this folder is the drafter.
    """
    folder.mkdir(parents=True)
    tensors = quantized(stage_tensors()) if tensors is None else tensors
    names, shards = sorted(tensors), [{}, {}, {}]
    for index, name in enumerate(names):
        shards[1 + (2 * index >= len(names))][f"mtp.{name}"] = tensors[name].contiguous()
    for index, shard in enumerate(shards):
        shard[f"layers.{index}.attn.wq_b.weight"] = torch.zeros(256, 1024)
    files = [f"model-{index + 1:05d}-of-00003.safetensors" for index in range(3)]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, folder / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(t.nbytes for shard in shards for t in shard.values())},
        "weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in shard},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    fields = target_config().to_dict() | DRAFTER | {"architectures": ["DeepseekV4ForCausalLM"]}
    fields |= {"quantization_config": FP8, "expert_dtype": "fp4"} | raw
    (folder / "config.json").write_text(json.dumps({n: v for n, v in fields.items() if v is not ...}))
    return folder
