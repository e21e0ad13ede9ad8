"""Drafters for Qwen3.5 targets: layers of Qwen3.5's own, with gates beside the queries, beside those of Qwen3."""

import copy
import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5Attention,
    Qwen3_5MLP,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)

from tests.batch.conftest import ragged
from transformers_dspark import DSparkDrafter, DSparkGenerationConfig

from .sweep import RecurrentLab


TAPS, BLOCK, MASK = [0, 1], 4, 2


class NativeLayer(nn.Module):
    """A layer of a drafter, put together of Qwen3.5's modules; the context goes past the first norm."""

    def __init__(self, config):
        super().__init__()
        self.self_attn, self.mlp = Qwen3_5Attention(config, 1), Qwen3_5MLP(config, config.intermediate_size)
        self.input_layernorm = Qwen3_5RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3_5RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, states, context, angles):
        seen = torch.cat((context, self.input_layernorm(states)), dim=1)
        mixed, _ = self.self_attn(seen, position_embeddings=angles, attention_mask=None)
        states = states + mixed[:, context.shape[1] :]
        return states + self.mlp(self.post_attention_layernorm(states))


class NativeDrafter(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.fc = nn.Linear(len(TAPS) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3_5RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(NativeLayer(config) for _ in range(2))
        self.norm = Qwen3_5RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.config = config
        for parameter in self.parameters():  # norms included, which are offsets from 1
            nn.init.normal_(parameter, std=0.3)

    def forward(self, target, taps, anchors):
        """Logits of a block behind `(rows, length, ...)` taps."""
        context = self.hidden_norm(self.fc(taps))
        block = torch.cat((anchors[:, None], torch.full((len(anchors), BLOCK - 1), MASK)), dim=1)
        states = target.get_input_embeddings()(block)
        positions = torch.arange(taps.shape[1] + BLOCK)[None].expand(len(anchors), -1)
        angles = Qwen3_5TextRotaryEmbedding(self.config)(states, positions[None].expand(3, -1, -1))
        for layer in self.layers:
            states = layer(states, context, angles)
        return target.lm_head(self.norm(states))


@pytest.fixture(scope="module")
def lab():
    return RecurrentLab()


@pytest.fixture(scope="module", params=["qwen3.5", "qwen3.5-multimodal"])
def target(lab, request):
    return lab.target(request.param)


@pytest.fixture
def native(target, tmp_path):
    """A published drafter, and the modules it was saved from."""
    config = copy.deepcopy(target.config.get_text_config())
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    model = NativeDrafter(config).eval()
    for layer in model.layers:  # rows and columns of a block see each other
        layer.self_attn.is_causal = False
    raw = config.to_dict() | {
        "architectures": ["Qwen3_5DSparkModel"],
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "target_layer_ids": TAPS,
        "markov_rank": 0,
        "enable_qwen35_gated_q_proj": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    return tmp_path, model


def test_a_native_drafter_is_what_its_modules_are(target, native, tmp_path):
    path, model = native
    drafter = DSparkDrafter.from_pretrained(path).bind_target(target)
    assert drafter.config.backbone_type == "qwen3_5"
    assert drafter.config.rotary_size == drafter.config.head_dim // 4
    taps = torch.randn(2, 7, drafter.fc.in_features, generator=torch.Generator().manual_seed(2))
    anchors, context = torch.tensor([3, 9]), drafter.new_context()
    with torch.no_grad():
        drafter.extend_context(context, taps, torch.arange(7).expand(2, -1))
        ours = drafter.propose(anchors, torch.full((2,), 7), context)
        expected = model(target, taps, anchors)
    torch.testing.assert_close(ours.logits, expected, rtol=1e-4, atol=1e-4)
    drafter.save_pretrained(tmp_path / "canonical")
    again = DSparkDrafter.from_pretrained(tmp_path / "canonical").bind_target(target)
    with torch.no_grad():
        assert torch.equal(again.propose(anchors, torch.full((2,), 7), context).logits, ours.logits)


def test_a_native_drafter_drafts(target, native):
    drafter, (ids, mask) = DSparkDrafter.from_pretrained(native[0]), ragged(2)
    config = DSparkGenerationConfig(do_sample=False, max_new_tokens=10, return_dict_in_generate=True)
    ours = target.generate(ids, attention_mask=mask, assistant_model=drafter, generation_config=config)
    assert torch.equal(ours.sequences, target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=10))
    assert max(map(max, ours.dspark.verify_lengths)) == BLOCK
    assert torch.equal(drafter.embed(torch.tensor([3])), target.get_input_embeddings()(torch.tensor([3])))
