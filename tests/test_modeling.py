"""The drafter as a model of Transformers: saving, reopening, binding, context, and its configuration."""

import copy
import io
import json
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import dispatch_model
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as token_models
from transformers import (
    AutoConfig,
    AutoModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    modeling_utils,
    pipeline,
)
from transformers.utils import hub

import transformers_dspark
from transformers_dspark import DSparkConfig, DSparkDrafter, DSparkGenerationConfig


SHAPE = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
PACKAGE = Path(transformers_dspark.__file__).parent


def make(**changes) -> DSparkDrafter:
    torch.manual_seed(0)
    config = DSparkConfig(
        **SHAPE | {"mask_token_id": 49, "target_layer_ids": [0, 1], "markov_rank": 4, "block_size": 4} | changes
    )
    drafter = DSparkDrafter(config).eval()
    if config.has_reduced_vocabulary:
        drafter.d2t.copy_(torch.arange(config.draft_vocab_size))
    return drafter


def tiny_target(**changes) -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**SHAPE | {"num_hidden_layers": 3} | changes)).eval()


def fresh(code: str, *, without_package: bool = False, cwd: Path | None = None) -> str:
    """Runs code in a new process, where `transformers_dspark` may be made unimportable."""
    if without_package:
        code = f"import sys; sys.modules['transformers_dspark'] = None\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ---- saving


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"draft_vocab_size": 20, "enable_confidence_head": True, "confidence_head_with_markov": True},
        {"own_embeddings": True, "markov_head_type": "gated"},
        {"own_embeddings": True, "tie_word_embeddings": True, "markov_head_type": "rnn"},
        {"backbone_type": "gemma4", "attention_k_eq_v": True, "head_dim": 8},
        {"enable_confidence_head": True, "confidence_temperatures": [1.0, 1.5, 2.0, 0.5]},
        {"own_embeddings": True, "own_head": False, "sample_from_anchor": False, "layout_source": "flag"},
        {"own_head": True, "draft_vocab_size": 20, "raw_embedding": True},
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 3,
            "sliding_window_from": "anchor",
            "causal_layer_types": ["sliding_attention"],
            "has_attention_sinks": True,
        },
    ],
    ids=[
        "plain",
        "reduced vocabulary",
        "own",
        "tied",
        "gemma4",
        "temperatures",
        "own embedding, filler",
        "own head",
        "windows",
    ],
)
def test_round_trip(changes, tmp_path):
    drafter = make(**changes)
    drafter.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["model_type"] == "dspark"
    assert raw["architectures"] == ["DSparkDrafter"]
    files = load_file(tmp_path / "model.safetensors")
    assert all(tensor.numel() for tensor in files.values())
    for again in (DSparkDrafter.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
        assert type(again) is DSparkDrafter
        ours, theirs = drafter.state_dict(), again.state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert again.config.confidence_temperatures == drafter.config.confidence_temperatures
        again.save_pretrained(tmp_path / "again")
        assert (tmp_path / "again" / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
        assert json.loads((tmp_path / "again" / "config.json").read_text()) == raw
    assert type(AutoConfig.from_pretrained(tmp_path)) is DSparkConfig


def test_shards_of_the_canonical_form(tmp_path):
    drafter = make(own_embeddings=True)
    drafter.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = DSparkDrafter.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in drafter.state_dict().items())


def test_pushing_brings_the_options_of_drafting(tmp_path, monkeypatch):
    pushed = {}

    def upload(self, folder, repo_id, files_timestamps, token=None, **kwargs):
        new = [path.name for path in Path(folder).iterdir() if path.name not in files_timestamps]
        pushed.setdefault((repo_id, token), set()).update(new)

    class Api:
        def create_repo(self, repo_id, **kwargs):
            return SimpleNamespace(repo_id=repo_id)

    for module in (hub, modeling_utils):
        monkeypatch.setattr(module, "hf_api", Api)
        monkeypatch.setattr(module, "create_and_tag_model_card", lambda *args, **kwargs: ModelCard("---\n---\n"))
    monkeypatch.setattr(hub.PushToHubMixin, "_upload_modified_files", upload)
    drafter = make()
    drafter.generation_config = DSparkGenerationConfig(seed=3)
    drafter.save_pretrained(tmp_path / "mine", push_to_hub=True)
    drafter.save_pretrained(tmp_path / "again", push_to_hub=True, repo_id="org/it", token="t", commit_message="m")
    assert pushed.keys() == {("mine", None), ("org/it", "t")}
    assert all({"model.safetensors", "config.json", "generation_config.json"} <= names for names in pushed.values())


REOPEN = """
import hashlib, torch
{imports}
drafter = {opened}
digest = hashlib.sha256()
for name, tensor in sorted(drafter.state_dict().items()):
    digest.update(name.encode() + tensor.numpy().tobytes())
print(type(drafter).__module__.split(".")[0], digest.hexdigest())
"""


def digest_of(drafter: DSparkDrafter) -> str:
    code = REOPEN.partition("digest =")[2].rpartition("print")[0]
    scope = {"drafter": drafter}
    exec("import hashlib\ndigest =" + code, scope)
    return scope["digest"].hexdigest()


def test_a_fresh_process_reopens_it(tmp_path):
    drafter = make(draft_vocab_size=20)
    drafter.save_pretrained(tmp_path)
    imports = "import transformers_dspark\nfrom transformers import AutoConfig, AutoModel"
    opened = f"AutoModel.from_pretrained({str(tmp_path)!r}, config=AutoConfig.from_pretrained({str(tmp_path)!r}))"
    assert fresh(REOPEN.format(imports=imports, opened=opened)) == f"transformers_dspark {digest_of(drafter)}"


def test_a_fresh_process_without_the_package_reopens_it(tmp_path):
    """The folder brings its own code; only the weights' format and Transformers are needed."""
    drafter = make(draft_vocab_size=20, markov_head_type="rnn")
    drafter.save_pretrained(tmp_path / "drafter")
    raw = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert raw["auto_map"] == {
        "AutoConfig": "configuration_dspark.DSparkConfig",
        "AutoModel": "modeling_dspark.DSparkDrafter",
    }
    for name in ("configuration", "modeling", "backbone", "heads", "borrowed", "masks"):
        copy, source = tmp_path / "drafter" / f"{name}_dspark.py", PACKAGE / f"{name}_dspark.py"
        assert copy.read_text() == source.read_text()
    imports = f"import os; os.environ['HF_MODULES_CACHE'] = {str(tmp_path / 'modules')!r}\n"
    imports += "from transformers import AutoModel"
    opened = f"AutoModel.from_pretrained({str(tmp_path / 'drafter')!r}, trust_remote_code=True)"
    printed = fresh(REOPEN.format(imports=imports, opened=opened), without_package=True, cwd=tmp_path)
    assert printed == f"transformers_modules {digest_of(drafter)}"


FORKS = """
import os, sys
import transformers.modeling_utils, torch._dynamo  # what every child would spend its time on; no model code
assert "transformers.models.auto.modeling_auto" not in sys.modules
for statement in {statements}:
    child = os.fork()
    if child == 0:
        exec(statement + "; from transformers import AutoModel, AutoModelForCausalLM")
        assert AutoModel._model_mapping._extra_content or "transformers_dspark" not in sys.modules
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(statement)
"""


def test_any_module_can_come_first():
    """Ours or Transformers': our modules load Transformers', whose import hooks in turn ask for ours."""
    names = sorted(path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__"))
    statements = [f"import transformers_dspark.{name}" for name in names]
    statements += [
        f"import transformers_dspark; from transformers{name}"
        for name in (
            " import LlamaForCausalLM",
            " import Qwen3ForCausalLM",
            " import GenerationMixin",
            " import pipeline",
            ".models.qwen3.modeling_qwen3 import Qwen3Model",
            ".models.auto import modeling_auto",
        )
    ]
    assert fresh(FORKS.format(statements=statements)) == ""


def test_pipeline_opens_a_folder_with_the_targets_tokenizer(tmp_path):
    """Also when the drafter's configuration does not name the target's special tokens."""
    inner = Tokenizer(token_models.WordLevel({f"t{i:02d}": i for i in range(50)}, unk_token="t00"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer, target = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="t00"), tiny_target(pad_token_id=0)
    drafter = make()
    assert drafter.config.eos_token_id != target.config.eos_token_id
    drafter.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    texts = [
        pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=assistant, device="cpu")(
            "t05 t17 t03", max_new_tokens=12, do_sample=False
        )
        for assistant in (None, str(tmp_path))
    ]
    assert texts[0] == texts[1]


# ---- binding


def test_binding_copies_nothing():
    drafter, target = make(), tiny_target()
    assert drafter.bind_target(target) is drafter
    assert drafter._borrowed.head_tensors()[0] is target.lm_head.weight
    assert drafter._borrowed.embedding is target.get_input_embeddings()
    before = drafter._borrowed
    assert drafter.bind_target(target)._borrowed is before
    assert not any(parameter is target.lm_head.weight for parameter in drafter.parameters())


HEAD_CHANGES = {
    "moved and cast": lambda target: target.to(torch.float64),
    "replaced": lambda target: target.load_state_dict(
        {name: tensor + 0.1 for name, tensor in target.state_dict().items()}, assign=True
    ),
    "trained in place": lambda target: target.lm_head.weight.add_(0.1),
    "bias trained": lambda target: target.lm_head.bias.add_(1.0),
}


@pytest.mark.parametrize("change", HEAD_CHANGES)
@pytest.mark.parametrize("size", [50, 20], ids=["full", "reduced"])
def test_a_changed_head_is_noticed(size, change):
    drafter, target, hidden = make(draft_vocab_size=size), tiny_target(), torch.randn(2, 3, 16)
    target.lm_head.bias = torch.nn.Parameter(torch.randn(50))
    drafter.bind_target(target)
    with torch.no_grad():
        before = drafter.unembed(hidden)
        HEAD_CHANGES[change](target)
        after = drafter.bind_target(target).unembed(hidden)
        full = target.lm_head(hidden.to(target.dtype))
    assert after.dtype == target.dtype
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, full[..., drafter.draft_vocabulary()])


def test_an_unchanged_head_is_copied_once():
    drafter, hidden = make(draft_vocab_size=20).bind_target(tiny_target()), torch.randn(2, 3, 16, requires_grad=True)
    with torch.inference_mode():
        drafter.unembed(hidden)
    rows = drafter._borrowed.rows
    drafter.unembed(hidden).sum().backward()
    assert drafter._borrowed.rows is rows


def test_copies_leave_the_targets_parts_behind():
    drafter, target, ids = make(draft_vocab_size=20), tiny_target(), torch.tensor([1, 2])
    file = io.BytesIO()
    torch.save(drafter, file)
    unbound_size = file.tell()
    expected = drafter.bind_target(target).embed(ids)
    file = io.BytesIO()
    torch.save(drafter, file)
    assert file.tell() == unbound_size
    file.seek(0)
    for again in (copy.deepcopy(drafter), pickle.loads(pickle.dumps(drafter)), torch.load(file, weights_only=False)):
        with pytest.raises(RuntimeError, match="bind_target"):
            again.embed(ids)
        assert torch.equal(again.bind_target(target).embed(ids), expected)
    assert torch.equal(drafter.embed(ids), expected)  # itself still bound


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "taps of hidden size 16, the target has 32"),
        ({"vocab_size": 51}, "vocabulary has 50 tokens, the target's 51"),
        ({"num_hidden_layers": 1}, "taps layer 1, the target's last is 0"),
    ],
)
def test_target_that_does_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        make().bind_target(tiny_target(**changes))


@pytest.mark.parametrize("part", ["embedding", "head"])
def test_offloaded_parts_cannot_be_borrowed(part, tmp_path):
    place = {"model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    place |= {"lm_head": "cpu"} | {"embedding": {"model.embed_tokens": "disk"}, "head": {"lm_head": "disk"}}[part]
    drafter, target = make(), tiny_target()
    drafter.bind_target(target)
    dispatch_model(target, place, main_device="cpu", offload_dir=tmp_path)
    with pytest.raises(ValueError, match=f"its {part} offloaded, .* `own_embeddings=True`"):
        make().bind_target(target)
    with pytest.raises(ValueError, match=f"its {part} offloaded"):  # although it was bound before
        target.generate(torch.tensor([[1, 2, 3]]), assistant_model=drafter, max_new_tokens=2)
    make(own_embeddings=True).check_target(target)


def test_target_on_the_last_layer_and_the_embedding_fit():
    make(target_layer_ids=[-1, 2]).check_target(tiny_target())


# ---- drafting


def test_reduced_vocabulary():
    drafter, target = make(draft_vocab_size=20), tiny_target()
    drafter.bind_target(target)
    context = drafter.new_context()
    with torch.no_grad():
        drafter.extend_context(context, torch.randn(3, 5, 32), torch.arange(5).expand(3, -1))
        anchors, places = torch.tensor([1, 2, 49]), torch.full((3,), 5)
        hidden = drafter.block_states(anchors, places, context)
        proposal = drafter.propose(anchors, places, context)
        full = hidden @ target.lm_head.weight.T  # [3, 4, 50]
    kept = torch.arange(20) * 2
    assert proposal.logits.shape == (3, 4, 50)
    assert torch.equal(proposal.logits.isfinite()[0, 0].nonzero().squeeze(1), kept)
    assert bool((proposal.tokens % 2 == 0).all())
    torch.testing.assert_close(drafter.unembed(hidden), full[..., kept])
    bias = drafter.markov_head.markov_w2(drafter.markov_head.embed(anchors))
    torch.testing.assert_close(proposal.logits[:, 0, kept], full[:, 0, kept] + bias)


def test_rows_do_not_see_each_other():
    drafter = make(own_embeddings=True, markov_head_type="rnn", enable_confidence_head=True)
    taps, anchors = torch.randn(3, 6, 32), torch.tensor([3, 4, 5])

    def propose(rows):
        context = drafter.new_context()
        drafter.extend_context(context, taps[rows], torch.arange(6).expand(len(rows), -1))
        return drafter.propose(anchors[rows], torch.full((len(rows),), 6), context)

    with torch.no_grad():
        together = propose([0, 1, 2])
        for row in range(3):
            alone = propose([row])
            assert torch.equal(alone.tokens[0], together.tokens[row])
            torch.testing.assert_close(alone.logits[0], together.logits[row])
            torch.testing.assert_close(alone.confidence[0], together.confidence[row])


def test_select_and_keep_going():
    drafter = make(own_embeddings=True, enable_confidence_head=True, confidence_head_with_markov=True)
    context = drafter.new_context()
    asked = []

    def select(k, logits, tokens):
        assert logits.shape == (2, 50)
        assert tokens.shape == (2, k)
        return torch.tensor([k, k + 10]), logits / 2

    def keep_going(k, confidence, tokens):
        asked.append((k, confidence.shape, tokens.tolist()))
        return k < 2

    with torch.no_grad():
        drafter.extend_context(context, torch.randn(2, 3, 32), torch.arange(3).expand(2, -1))
        arguments = (torch.tensor([1, 2]), torch.tensor([3, 3]), context)
        proposal = drafter.propose(*arguments, select=select, keep_going=keep_going)
        none = drafter.propose(*arguments, keep_going=lambda k, confidence, tokens: False)
        wide = drafter.propose(*arguments, width=99)
    assert proposal.tokens.tolist() == [[0, 1], [10, 11]]
    assert proposal.logits.shape == (2, 2, 50)
    assert proposal.confidence.shape == (2, 2)
    assert [(k, shape) for k, shape, _ in asked] == [(0, (2,)), (1, (2,)), (2, (2,))]
    assert asked[2][2] == [[0, 1], [10, 11]]
    assert none.tokens.shape == (2, 0)
    assert none.logits.shape == (2, 0, 50)
    assert wide.tokens.shape == (2, 4)


@pytest.mark.parametrize("own", [True, False], ids=["own", "borrowed"])
def test_ids_of_a_padded_head_are_read_as_mask_tokens(own):
    drafter = make(own_embeddings=own, enable_confidence_head=True, confidence_head_with_markov=True)
    drafter.bind_target(tiny_target())
    context = drafter.new_context()

    def padded(k, logits, tokens):
        return torch.tensor([50 + k, 49]), logits

    with torch.no_grad():
        drafter.extend_context(context, torch.randn(1, 3, 32).expand(2, -1, -1), torch.arange(3).expand(2, -1))
        proposal = drafter.propose(torch.tensor([50, 49]), torch.tensor([3, 3]), context, select=padded)
    assert proposal.tokens[0].tolist() == [50, 51, 52, 53]
    torch.testing.assert_close(proposal.logits[0], proposal.logits[1])
    torch.testing.assert_close(proposal.confidence[0], proposal.confidence[1])


def test_confidence_temperatures():
    drafter = make(own_embeddings=True, enable_confidence_head=True)
    context = drafter.new_context()
    with torch.no_grad():
        drafter.extend_context(context, torch.randn(1, 3, 32), torch.arange(3)[None])
        arguments = (torch.tensor([1]), torch.tensor([3]), context)
        plain = drafter.propose(*arguments).confidence
        drafter.config.confidence_temperatures = [1.0, 2.0, 0.5, 4.0]
        tempered = drafter.propose(*arguments).confidence
    torch.testing.assert_close(
        tempered.logit(), plain.logit() / torch.tensor([1.0, 2.0, 0.5, 4.0]), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": "x"}, "vocab_size='x'"),
        ({"block_size": 0}, "block_size=0"),
        ({"block_size": 2.5}, r"block_size=2\.5"),
        ({"target_layer_ids": [1, 1]}, r"target_layer_ids=\[1, 1\]"),
        ({"target_layer_ids": [-2]}, r"target_layer_ids=\[-2\]"),
        ({"target_layer_ids": []}, r"target_layer_ids=\[\]"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads=3"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"backbone_type": "llama"}, "backbone_type='llama'"),
        ({"markov_rank": -1}, "markov_rank=-1"),
        ({"markov_head_type": "lstm"}, "markov_head_type='lstm'"),
        (
            {"markov_rank": 0, "enable_confidence_head": True, "confidence_head_with_markov": True},
            "confidence_head_with_markov=True needs markov_rank > 0",
        ),
        ({"mask_token_id": 50}, r"mask_token_id=50 must lie in 0\.\.49"),
        ({"draft_vocab_size": 51}, "draft_vocab_size=51"),
        ({"confidence_temperatures": [1.0]}, r"confidence_temperatures=\[1\.0\] must hold 4 positive numbers"),
        ({"confidence_temperatures": [1.0, 1.0, 0.0, 1.0]}, "must hold 4 positive numbers"),
        ({"confidence_temperatures": [1.0, 1.0, float("inf"), 1.0]}, "must hold 4 positive numbers"),
        ({"confidence_temperatures": [1.0, 1.0, True, 1.0]}, "must hold 4 positive numbers"),
    ],
)
def test_configurations_that_no_drafter_can_have(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_casting_keeps_the_rotary_frequencies():
    drafter = make()
    exact = drafter.rotary_emb.inv_freq.clone()
    assert drafter.to(torch.bfloat16).dtype == torch.bfloat16
    assert torch.equal(drafter.rotary_emb.inv_freq, exact)
    cos, _ = drafter.rotary_emb(torch.ones(1, dtype=torch.bfloat16), torch.tensor([[1000]]))
    torch.testing.assert_close(cos[0, 0, 1], (1000 * exact[1]).cos().bfloat16())


# ---- layouts, windows and gaps


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_filler_layout_drafts_from_the_second_row(kind):
    """The same weights in both layouts: row k of the one proposes what row k of the other does, without row 0."""
    changes = {"own_embeddings": True, "enable_confidence_head": True, "confidence_head_with_markov": True}
    anchor_first, filler = (make(sample_from_anchor=a, markov_head_type=kind, **changes) for a in (True, False))
    assert (anchor_first.config.num_draft_tokens, filler.config.num_draft_tokens) == (4, 3)
    context, arguments = filler.new_context(), (torch.tensor([3, 4]), torch.tensor([5, 5]))
    taps = torch.randn(2, 5, 32)
    with torch.no_grad():
        filler.extend_context(context, taps, torch.arange(5).expand(2, -1))
        hidden = filler.block_states(*arguments, context)
        assert torch.equal(hidden, anchor_first.block_states(*arguments, context))
        proposal, narrow = filler.propose(*arguments, context), filler.propose(*arguments, context, width=2)
        # by hand: the anchor is the token before row 1; a recurrent head has seen row 0 with it
        head, previous, state = filler.markov_head, arguments[0], None
        _, state = head.features(head.embed(previous), hidden[:, 0], None)
        for k in range(3):
            embedded = head.embed(previous)
            features, state = head.features(embedded, hidden[:, k + 1], state)
            logits = filler.lm_head(hidden[:, k + 1]) + head.markov_w2(features)
            torch.testing.assert_close(proposal.logits[:, k], logits)
            confidence = filler.confidence_head(hidden[:, k + 1], embedded).sigmoid()
            torch.testing.assert_close(proposal.confidence[:, k], confidence)
            previous = logits.argmax(dim=-1)
            assert torch.equal(proposal.tokens[:, k], previous)
    assert proposal.tokens.shape == (2, 3)
    assert torch.equal(narrow.tokens, proposal.tokens[:, :2])


MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3, "block_size": 4}
ATTENTION = {
    "from the query": MIXED,
    "from the anchor": MIXED | {"sliding_window_from": "anchor"},
    "causal where it slides": MIXED | {"causal_layer_types": ["sliding_attention"]},
    "causal throughout": {"causal_layer_types": ["full_attention"]},
    "shorter than the block": MIXED | {"sliding_window": 2},
    "sinks": MIXED | {"has_attention_sinks": True, "causal_layer_types": ["sliding_attention", "full_attention"]},
    "one key head": MIXED | {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8},
}


def by_hand(drafter, layer: int, taps: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """One row's attention output, looked up key by key; the block begins behind the taps."""
    config, attention, n = drafter.config, drafter.layers[layer].self_attn, taps.shape[1]
    context = drafter.hidden_norm(drafter.fc(taps))
    joined = torch.cat((context, states), dim=1)
    places = torch.arange(joined.shape[1])[None]
    cos_sin = drafter.rotary_emb(joined, places)
    keys, values = attention.keys_values(joined, cos_sin)
    queries = attention.q_norm(attention.q_proj(joined).unflatten(-1, (-1, config.head_dim)))
    half = config.head_dim // 2
    turned = torch.cat((-queries[..., half:], queries[..., :half]), dim=-1)
    queries = queries * cos_sin[0].unsqueeze(2) + turned * cos_sin[1].unsqueeze(2)
    kind, group = config.layer_types[layer], config.num_attention_heads // config.num_key_value_heads
    mixed = torch.zeros(1, states.shape[1], config.num_attention_heads, config.head_dim)
    for row in range(states.shape[1]):
        for head in range(config.num_attention_heads):
            weights = []
            for key in range(joined.shape[1]):
                seen = key <= n + row or kind not in config.causal_layer_types
                if kind == "sliding_attention":
                    start = n - config.sliding_window
                    if config.sliding_window_from == "query":
                        start = n + row - config.sliding_window + 1
                    seen = seen and key >= start
                score = queries[0, n + row, head] @ keys[0, head // group, key] * config.head_dim**-0.5
                weights.append(score.exp() if seen else torch.tensor(0.0))
            total = sum(weights)
            if config.has_attention_sinks:
                total = total + attention.attention_sink_bias[head].exp()
            mixed[0, row, head] = sum(w * v for w, v in zip(weights, values[0, head // group], strict=True)) / total
    return attention.o_proj(mixed.flatten(2))


@pytest.mark.parametrize("name", ATTENTION)
@torch.no_grad()
def test_attention_by_hand(name):
    drafter = make(own_embeddings=True, **ATTENTION[name])
    for layer in drafter.layers:
        if drafter.config.has_attention_sinks:
            layer.self_attn.attention_sink_bias.normal_()
    taps, outputs = torch.randn(1, 7, 32), []
    for layer in drafter.layers:
        layer.self_attn.register_forward_hook(lambda module, args, output: outputs.append((args[0], output)))
    context = drafter.new_context()
    for part in ([0, 4], [4, 7]):
        drafter.extend_context(context, taps[:, slice(*part)], torch.arange(*part)[None])
    states = drafter.block_states(torch.tensor([5]), torch.tensor([7]), context)
    for layer, (given, output) in enumerate(outputs[:2]):
        torch.testing.assert_close(output, by_hand(drafter, layer, taps, given), rtol=1e-4, atol=1e-6)
    # packed, without a cache: two blocks at anchors 7 and 4, which must not see each other
    block = torch.full((1, 8), 49)
    block[0, 0] = block[0, 4] = 5
    places = torch.cat((torch.arange(7, 11), torch.arange(4, 8)))[None]
    seen = torch.arange(7) < torch.tensor([7] * 4 + [4] * 4)[:, None]
    own = torch.block_diag(torch.ones(4, 4), torch.ones(4, 4)).bool()
    packed = drafter(taps, torch.arange(7)[None], block, places, torch.cat((seen, own), dim=1)[None, None])
    torch.testing.assert_close(packed[:, :4], states, rtol=1e-4, atol=1e-6)
    early = drafter.new_context()
    drafter.extend_context(early, taps[:, :4], torch.arange(4)[None])
    alone = drafter.block_states(torch.tensor([5]), torch.tensor([4]), early)
    torch.testing.assert_close(packed[:, 4:], alone, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_a_window_hides_what_lies_before_it():
    """A context token outside the window of every layer changes nothing; one layer of full attention sees it."""
    sliding = {"sliding_window": 4, "layer_types": ["sliding_attention"] * 2}
    for changes, same in (
        (sliding, True),
        (sliding | {"layer_types": ["sliding_attention", "full_attention"]}, False),
    ):
        drafter, taps, states = make(own_embeddings=True, **changes), torch.randn(1, 16, 32), []
        for touched in (False, True):
            context, given = drafter.new_context(), taps.clone()
            given[:, 3] += touched
            drafter.extend_context(context, given, torch.arange(16)[None])
            states.append(drafter.block_states(torch.tensor([5]), torch.tensor([16]), context))
        assert torch.equal(*states) == same


@pytest.mark.parametrize("name", ["full", *ATTENTION])
@torch.no_grad()
def test_rows_with_gaps_draft_as_each_alone(name):
    drafter = make(own_embeddings=True, **ATTENTION.get(name, {}))
    counts, taps, together = ([3, 2, 4], [1, 4, 2]), torch.randn(3, 12, 32), drafter.new_context()
    done = torch.zeros(3, dtype=torch.long)
    for portion in counts:
        steps, new = torch.arange(max(portion)), torch.tensor(portion)
        places = done[:, None] + steps
        keep = steps < new[:, None]
        drafter.extend_context(together, taps.gather(1, places[..., None].expand(-1, -1, 32)), places, keep)
        done += new
    anchors = torch.tensor([3, 4, 5])
    proposal = drafter.propose(anchors, done, together)
    for row, length in enumerate(done.tolist()):
        alone = drafter.new_context()
        drafter.extend_context(alone, taps[row : row + 1, :length], torch.arange(length)[None])
        single = drafter.propose(anchors[row : row + 1], done[row : row + 1], alone)
        torch.testing.assert_close(single.logits[0], proposal.logits[row], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types=.* for 2 layers"),
        ({"layer_types": ["full_attention", "conv"]}, "layer_types="),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window=None must be at least 1"),
        ({"sliding_window_from": "end"}, "sliding_window_from='end'"),
        ({"causal_layer_types": ["conv"]}, "causal_layer_types="),
        ({"sample_from_anchor": False, "block_size": 1}, "block_size=1 must be at least 2"),
        ({"sample_from_anchor": False, "confidence_temperatures": [1.0] * 4}, "must hold 3 positive numbers"),
        (MIXED | {"backbone_type": "gemma4"}, "throughout with backbone_type='gemma4'"),
    ],
)
def test_attention_fields_that_lie(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)
