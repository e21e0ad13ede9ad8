"""
A second drafter, made of Transformers' own layers and plain formulas, whose `state_dict` has the official names.

It recomputes everything for each block: context and block go through the attention modules of Qwen3 or Gemma4 as one
sequence without a causal mask, and only the block's outputs are kept.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import Gemma4TextConfig, Qwen3Config
from transformers.models.gemma4 import modeling_gemma4 as gemma4
from transformers.models.qwen3 import modeling_qwen3 as qwen3


SIZES = {
    "vocab_size": 311,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
SPECIAL = {
    "block_size": 5,
    "mask_token_id": 310,
    "target_layer_ids": [0, 2],
    "markov_rank": 16,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
QWEN3 = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "layer_types": ["full_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "sliding_window": 8,
    "final_logit_softcapping": 2.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


class Reference(nn.Module):
    """A drafter of a backbone, `"Qwen3"` or `"Gemma4"`, with random weights of a size that shows every mistake."""

    def __init__(self, backbone: str = "Qwen3", **changes) -> None:
        super().__init__()
        own = SIZES | (QWEN3 if backbone == "Qwen3" else GEMMA4) | changes
        self.facts = SPECIAL | {name: own.pop(name) for name in SPECIAL if name in own}
        self.backbone = backbone
        config_class = Qwen3Config if backbone == "Qwen3" else Gemma4TextConfig
        config = self.config = config_class(**own, attn_implementation="eager")
        norm_class = qwen3.Qwen3RMSNorm if backbone == "Qwen3" else gemma4.Gemma4RMSNorm
        layer_class = qwen3.Qwen3DecoderLayer if backbone == "Qwen3" else gemma4.Gemma4TextDecoderLayer
        width, taps, vocab = config.hidden_size, len(self.facts["target_layer_ids"]), config.vocab_size
        self.fc = nn.Linear(taps * width, width, bias=False)
        self.hidden_norm = norm_class(width, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([layer_class(config, i) for i in range(config.num_hidden_layers)])
        self.norm = norm_class(width, eps=config.rms_norm_eps)
        self.rotary = (qwen3.Qwen3RotaryEmbedding if backbone == "Qwen3" else gemma4.Gemma4TextRotaryEmbedding)(config)
        self.embed_tokens = nn.Embedding(vocab, width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        rank, kind = self.facts["markov_rank"], self.facts["markov_head_type"]
        if rank:
            self.markov_head = nn.ModuleDict(
                {"markov_w1": nn.Embedding(vocab, rank), "markov_w2": nn.Linear(rank, vocab, bias=False)}
            )
            if kind == "gated":
                self.markov_head["gate_proj"] = nn.Linear(width + rank, rank)
            if kind == "rnn":
                self.markov_head["joint_proj"] = nn.Linear(2 * rank + width, 3 * rank)
        if self.facts["enable_confidence_head"]:
            inputs = width + rank * self.facts["confidence_head_with_markov"]
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(inputs, 1)})
        for name, tensor in self.state_dict().items():
            if "inv_freq" not in name:
                scale = 0.3 if tensor.dim() > 1 else 0.2
                tensor.copy_(torch.randn_like(tensor) * scale + (1.0 if "norm" in name or "scalar" in name else 0.0))

    def raw_config(self) -> dict:
        raw = self.config.to_dict() | self.facts
        return raw | {"architectures": [f"{self.backbone}DSparkModel"]}

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: t.clone() for name, t in self.state_dict().items() if not name.startswith("rotary")}

    def save(self, folder: Path, config: dict | None = None, tensors: dict | None = None) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.raw_config() if config is None else config))
        save_file(self.tensors() if tensors is None else tensors, folder / "model.safetensors")
        return folder

    @torch.no_grad()
    def draft(self, taps: torch.Tensor, anchors: torch.Tensor):
        """States, base logits, ids, corrected logits and confidence logits of a block behind `(rows, n, ...)` taps."""
        rows, length, _ = taps.shape
        gamma = self.facts["block_size"]
        block = torch.full((rows, gamma), self.facts["mask_token_id"])
        block[:, 0] = anchors
        states = self.embed_tokens(block)
        if self.backbone == "Gemma4":
            states = states * self.config.hidden_size**0.5
        context = self.hidden_norm(self.fc(taps))
        positions = torch.arange(length + gamma).expand(rows, -1)
        extra = ("full_attention",) if self.backbone == "Gemma4" else ()
        angles = self.rotary(states, positions, *extra)
        mask = states.new_zeros(rows, 1, length + gamma, length + gamma)
        keywords = {"position_embeddings": angles, "attention_mask": mask}
        if extra:
            keywords["shared_kv_states"] = {}
        for layer in self.layers:
            joined = torch.cat((context, layer.input_layernorm(states)), dim=1)
            mixed = layer.self_attn(joined, **keywords)[0][:, -gamma:]
            if extra:
                states = states + layer.post_attention_layernorm(mixed)
                forward = layer.mlp(layer.pre_feedforward_layernorm(states))
                states = (states + layer.post_feedforward_layernorm(forward)) * layer.layer_scalar
            else:
                states = states + mixed
                states = states + layer.mlp(layer.post_attention_layernorm(states))
        states = self.norm(states)
        base = self.lm_head(states)
        if cap := getattr(self.config, "final_logit_softcapping", None):
            base = cap * torch.tanh(base / cap)
        return states, base, *self._chain(states, base, anchors)

    def _chain(self, states: torch.Tensor, base: torch.Tensor, anchors: torch.Tensor):
        rank, kind = self.facts["markov_rank"], self.facts["markov_head_type"]
        previous, state = anchors, torch.zeros(len(anchors), rank)
        ids, corrected, confidences = [], [], []
        for hidden, logits in zip(states.unbind(1), base.unbind(1), strict=True):
            w1 = self.markov_head["markov_w1"](previous) if rank else None
            if self.facts["enable_confidence_head"]:
                seen = torch.cat((hidden, w1), dim=1) if self.facts["confidence_head_with_markov"] else hidden
                confidences.append(self.confidence_head["proj"](seen).squeeze(1))
            features = w1
            if rank and kind == "gated":
                features = torch.sigmoid(self.markov_head["gate_proj"](torch.cat((hidden, w1), dim=1))) * w1
            elif rank and kind == "rnn":
                joint = self.markov_head["joint_proj"](torch.cat((state, w1, hidden), dim=1))
                gate = torch.sigmoid(joint[:, :rank])
                state = gate * state + (1 - gate) * torch.tanh(joint[:, rank : 2 * rank])
                features = torch.tanh(joint[:, 2 * rank :])
            corrected.append(logits + self.markov_head["markov_w2"](features) if rank else logits)
            previous = corrected[-1].argmax(dim=1)
            ids.append(previous)
        stacked = torch.stack(confidences, dim=1) if confidences else None
        return torch.stack(ids, dim=1), torch.stack(corrected, dim=1), stacked
