"""The sparse backbone against Transformers' own layers, fed with the keys and values that they should have."""

import pytest
import torch
from transformers import DeepseekV4Config, DynamicCache
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4DecoderLayer,
    DeepseekV4HyperHead,
    DeepseekV4RMSNorm,
    DeepseekV4RotaryEmbedding,
)

from tests.deepseek_v4.tiny import HIDDEN, SHAPE, STAGES, stage_tensors, tiny_target, write_checkpoint
from transformers_dspark import DSparkConfig, DSparkDrafter
from transformers_dspark.backbone_dspark import DSparkContext
from transformers_dspark.ragged_context import RaggedContext
from transformers_dspark.windows import VerifyWindow


GAMMA, WINDOW, MASK = 5, SHAPE["sliding_window"], 96
NAMES = {
    "attn.wq_a.weight": "self_attn.q_a_proj.weight", "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight", "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight", "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight", "attn.attn_sink": "self_attn.sinks",
    "attn_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn.gate.weight": "mlp.gate.weight", "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
    "hc_attn_fn": "attn_hc.fn", "hc_attn_base": "attn_hc.base", "hc_attn_scale": "attn_hc.scale",
    "hc_ffn_fn": "ffn_hc.fn", "hc_ffn_base": "ffn_hc.base", "hc_ffn_scale": "ffn_hc.scale",
}  # fmt: skip


class TransformersStages:
    """
    The drafter's backbone out of Transformers' parts. The context's keys are made and kept by Transformers' attention
    itself: it is given the projected taps where a layer would give it its normed input, and a plain cache.
    """

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        config = DeepseekV4Config(
            **SHAPE,
            num_hidden_layers=STAGES,
            layer_types=["sliding_attention"] * STAGES,
            mlp_layer_types=["moe"] * STAGES,
            attn_implementation="eager",
            experts_implementation="eager",
        )
        self.streams = config.hc_mult
        self.layers = [self.layer(config, stage) for stage in range(STAGES)]
        self.rotary = DeepseekV4RotaryEmbedding(config)
        self.main_norm, self.norm = DeepseekV4RMSNorm(HIDDEN), DeepseekV4RMSNorm(HIDDEN)
        self.main_norm.weight.data = tensors["0.main_norm.weight"]
        self.norm.weight.data = tensors["2.norm.weight"]
        self.head = DeepseekV4HyperHead(config)
        self.head.load_state_dict({n: tensors[f"2.hc_head_{n[3:]}"] for n in ("hc_fn", "hc_base", "hc_scale")})

    def layer(self, config: DeepseekV4Config, stage: int) -> DeepseekV4DecoderLayer:
        layer, prefix = DeepseekV4DecoderLayer(config, stage).eval(), f"{stage}."
        state = {ours: self.tensors[prefix + theirs] for theirs, ours in NAMES.items()}
        experts = [
            {part: self.tensors[f"{prefix}ffn.experts.{expert}.w{part}.weight"] for part in "123"}
            for expert in range(SHAPE["n_routed_experts"])
        ]
        state["mlp.experts.gate_up_proj"] = torch.stack([torch.cat((e["1"], e["3"])) for e in experts])
        state["mlp.experts.down_proj"] = torch.stack([e["2"] for e in experts])
        layer.load_state_dict(state)
        return layer

    def angles(self, states: torch.Tensor, positions: torch.Tensor) -> dict:
        return {"main": self.rotary(states, positions, layer_type="main")}

    @torch.no_grad()
    def __call__(self, taps: torch.Tensor, embedded: torch.Tensor, start: int = 0) -> torch.Tensor:
        """States before the norm of a block `(gamma, hidden)` behind a context `(length, 3 * hidden)`."""
        length, cache = taps.shape[0], DynamicCache()
        main = self.main_norm(taps[None] @ self.tensors["0.main_proj.weight"].T)
        before = torch.arange(start, start + length)[None]
        block = torch.arange(start + length, start + length + GAMMA)[None]
        if length:
            for layer in self.layers:
                layer.self_attn(
                    main,
                    position_embeddings=self.angles(main, before),
                    position_ids=before,
                    attention_mask=None,
                    cache=cache,
                )
        hidden_from_all = max(0, length - WINDOW)
        mask = torch.zeros(1, 1, GAMMA, length + GAMMA)
        mask[..., :hidden_from_all] = float("-inf")
        states = embedded[None, :, None].expand(-1, -1, self.streams, -1).contiguous()
        for layer in self.layers:
            states = layer(
                states,
                position_embeddings=self.angles(embedded[None], block),
                position_ids=block,
                attention_mask=mask,
                cache=cache,
            )
        return self.head(states)[0]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def tensors():
    return stage_tensors()


@pytest.fixture(scope="module")
def drafter(target, tensors, tmp_path_factory):
    path = write_checkpoint(tmp_path_factory.mktemp("plain") / "checkpoint", tensors)
    return DSparkDrafter.from_pretrained(path, dtype=torch.float32).bind_target(target).eval()


@pytest.fixture(scope="module")
def reference(tensors):
    return TransformersStages(tensors)


def embedded(target, anchor: int) -> torch.Tensor:
    return target.get_input_embeddings()(torch.tensor([anchor] + [MASK] * (GAMMA - 1)))


def taps_of(*lengths: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(sum(lengths))
    return [torch.randn(length, 3 * HIDDEN, generator=random) for length in lengths]


@pytest.mark.parametrize("length", [0, 1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 2])
@torch.no_grad()
def test_a_block_is_what_transformers_layers_make_of_it(length, drafter, target, reference):
    """Committed in two parts, read through the window."""
    (taps,), context = taps_of(length), drafter.new_context()
    for some in taps.split([length // 3, length - length // 3]):
        at = torch.arange(context.length, context.length + len(some))[None]
        drafter.extend_context(context, some[None], at)
    states = drafter.block_states(torch.tensor([7]), torch.tensor([length]), context)
    wanted = reference(taps, embedded(target, 7))
    torch.testing.assert_close(states[0], wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_logits_read_the_norm_and_confidence_does_not(drafter, target, reference, tensors):
    (taps,), context = taps_of(13), drafter.new_context()
    drafter.extend_context(context, taps[None], torch.arange(13)[None])
    proposal = drafter.propose(torch.tensor([7]), torch.tensor([13]), context)
    states, previous = reference(taps, embedded(target, 7)), 7
    logits = target.get_output_embeddings()(reference.norm(states))
    w1, w2 = (tensors[f"2.markov_head.markov_w{n}.weight"] for n in (1, 2))
    for k in range(GAMMA):
        corrected = logits[k] + w2 @ w1[previous]
        features = torch.cat((states[k], w1[previous]))
        confidence = torch.sigmoid(tensors["2.confidence_head.proj.weight"] @ features)
        torch.testing.assert_close(proposal.logits[0, k], corrected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(proposal.confidence[0, k], confidence[0], rtol=1e-4, atol=1e-4)
        previous = int(corrected.argmax())
        assert int(proposal.tokens[0, k]) == previous


@torch.no_grad()
def test_rows_of_different_lengths_see_what_they_see_alone(drafter, target, reference):
    """The context of the batched loop, and that of single rows with gaps."""
    lengths, starts = [3, 21, 12, WINDOW], [0, 5, 0, 2]
    rows = taps_of(*lengths)
    ragged = RaggedContext(drafter, len(rows), max(lengths) + GAMMA)
    gaps = DSparkContext(STAGES)
    padded = torch.zeros(len(rows), max(lengths), 3 * HIDDEN)
    keep = torch.zeros(len(rows), max(lengths), dtype=torch.bool)
    positions = torch.zeros(len(rows), max(lengths), dtype=torch.long)
    for row, (taps, start) in enumerate(zip(rows, starts, strict=True)):
        places = torch.arange(start, start + len(taps))
        padded[row, : len(taps)], keep[row, : len(taps)], positions[row, : len(taps)] = taps, True, places
        widths = [len(taps) * (other == row) for other in range(len(rows))]
        window = VerifyWindow.pack(ragged.lengths, widths, taps.device)
        ragged.extend(drafter, taps[None], places[None], window)
        ragged.lengths[row] = len(taps)
    drafter.extend_context(gaps, padded, positions, keep)
    anchors = torch.tensor([4, 5, 6, 7])
    at = torch.tensor(lengths) + torch.tensor(starts)
    by_loop, by_gaps = (drafter.block_states(anchors, at, context) for context in (ragged, gaps))
    for row, (taps, start) in enumerate(zip(rows, starts, strict=True)):
        wanted = reference(taps, embedded(target, int(anchors[row])), start)
        torch.testing.assert_close(by_loop[row], wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(by_gaps[row], wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_training_sees_the_same_blocks(drafter):
    """Several packed blocks, each behind its own part of the context."""
    (taps,), anchors = taps_of(20), [6, 14]
    positions = torch.arange(20)[None]
    block = torch.tensor([[7] + [MASK] * 4 + [9] + [MASK] * 4])
    at = torch.cat([torch.arange(anchor, anchor + GAMMA) for anchor in anchors])[None]
    own = torch.tensor([0] * GAMMA + [1] * GAMMA)
    begins = torch.tensor(anchors)[own]
    sees = torch.cat((positions < begins[:, None], own[:, None] == own[None]), dim=1)[None, None]
    packed = drafter(taps[None], positions, block, at, sees)
    for index, (anchor, token) in enumerate(zip(anchors, (7, 9), strict=True)):
        context = drafter.new_context()
        drafter.extend_context(context, taps[None, :anchor], positions[:, :anchor])
        alone = drafter.block_states(torch.tensor([token]), torch.tensor([anchor]), context)
        torch.testing.assert_close(packed[0, index * GAMMA : (index + 1) * GAMMA], alone[0], rtol=1e-4, atol=1e-4)


def test_gradients_with_checkpointed_layers_are_the_same(drafter):
    (taps,), positions = taps_of(9), torch.arange(9)[None]
    grads = []
    drafter.train()
    for checkpointed in (False, True):
        drafter.zero_grad()
        (drafter.activation_checkpointing_enable if checkpointed else drafter.activation_checkpointing_disable)()
        states = drafter(taps[None], positions, torch.tensor([[7] + [MASK] * 4]), torch.arange(9, 14)[None])
        states.square().mean().backward()
        grads.append([p.grad.clone() for p in drafter.layers.parameters() if p.grad is not None])
    drafter.activation_checkpointing_disable()
    drafter.zero_grad()
    drafter.eval()
    assert len(grads[0]) > 50
    for plain, checkpointed in zip(*grads, strict=True):
        torch.testing.assert_close(plain, checkpointed)


def test_a_fresh_drafter_has_numbers_everywhere(drafter):
    torch.manual_seed(0)
    fresh = DSparkDrafter(DSparkConfig(**{**drafter.config.to_dict(), "initializer_range": 0.02}))
    for name, tensor in fresh.state_dict().items():
        assert tensor.abs().max() < 2, name  # as NaN is not
    assert float(fresh.layers[0].mlp.experts.gate_up_proj.detach().std()) == pytest.approx(0.02, rel=0.1)
