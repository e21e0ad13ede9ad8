"""A drafter's repository: opened in fresh processes with and without the package, by pipelines, and uploaded."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import LlamaConfig, LlamaForCausalLM, pipeline

from tests.cli.tokenizer import word_tokenizer
from tests.hub import LocalHub
from transformers_dspark import DSparkConfig, DSparkDrafter, DSparkGenerationConfig, cli
from transformers_dspark.packaging import TRANSFORMERS, model_card, write_repository


SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
RESULTS = [
    {
        "prompts": "chat",
        "temperature": 0.0,
        "answers": 7,
        "accepted_length": 3.25,
        "acceptance_by_position": [0.5, 0.25, None],
    }
]
WITHOUT = """
import sys

class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "transformers_dspark":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Gone())
"""
OPEN = """
import sys, torch
from transformers import AutoModel, AutoModelForCausalLM
target = AutoModelForCausalLM.from_pretrained(sys.argv[1])
drafter = AutoModel.from_pretrained(sys.argv[2], trust_remote_code=True)
assert type(drafter).__module__.startswith("transformers_modules.")
"""
DOOR = """
ids = torch.tensor([[5, 17, 3, 40], [9, 9, 21, 2]])
for rows in (1, 2):
    out = target.generate(
        input_ids=ids[:rows], attention_mask=torch.ones_like(ids[:rows]), custom_generate=sys.argv[2],
        trust_remote_code=True, assistant_model=drafter, max_new_tokens=16, do_sample=False,
        return_dict_in_generate=True,
    )
    print([out.sequences.tolist(), out.dspark.rounds])
"""

PROPOSE = """
context = drafter.bind_target(target).new_context()
taps = torch.arange(5 * 64).reshape(1, 5, 64).float() / 320
with torch.no_grad():
    drafter.extend_context(context, taps, torch.arange(5)[None])
    proposal = drafter.propose(torch.tensor([3]), torch.tensor([5]), context)
drafter.save_pretrained(sys.argv[3])
assert not any(name.startswith("transformers_dspark") for name in sys.modules)
print([proposal.tokens.tolist(), proposal.logits.sum().item()])
"""
ALONE = '''
import itertools, json
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

class Streamer(BaseStreamer):
    def __init__(self):
        self.parts = []
    def put(self, value):
        self.parts += value.flatten().tolist()
    def end(self):
        self.parts.append("end")

class Alternate(LogitsProcessor):
    """A user's grammar with a memory."""
    def __init__(self):
        self.calls = 0
    def __call__(self, input_ids, scores):
        self.calls += 1
        scores = scores.clone()
        scores[:, self.calls % 2 :: 2] = -float("inf")
        return scores

class Ends:
    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([input_ids.shape[1] >= 12])

words = {a + b: i for i, (a, b) in enumerate(itertools.product("ghijklmn", "stuvwxyz")) if i < 63} | {"abcdef": 63}
inner = Tokenizer(models.WordLevel(words, unk_token="gs"))
inner.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
ids = torch.tensor([[5, 17, 3, 40]])
padded, mask = torch.tensor([[0, 0, 5, 17, 3, 40]]), torch.tensor([[0, 0, 1, 1, 1, 1]])
door = {"custom_generate": sys.argv[2], "trust_remote_code": True, "assistant_model": drafter}

def answers(ids=ids, mask=None, fresh=dict, **options):
    mask = torch.ones_like(ids) if mask is None else mask
    def run(**more):
        given = {"max_new_tokens": 24, "do_sample": False, **options, **fresh(), **more}
        return target.generate(input_ids=ids, attention_mask=mask, **given)
    return run(**door), run()

greedy, full = answers()[1][0].tolist(), {"return_dict_in_generate": True, "output_scores": True}
stop = [tokenizer.convert_ids_to_tokens(greedy[10])]
results = {
    "greedy": answers(),
    "left padding": answers(padded, mask),
    "end of sequence": answers(eos_token_id=greedy[13], pad_token_id=0),
    "repetition": answers(repetition_penalty=1.4, no_repeat_ngram_size=2, min_new_tokens=3),
    "grammar": answers(fresh=lambda: {"logits_processor": LogitsProcessorList([Alternate()])}),
    "criterion": answers(stopping_criteria=StoppingCriteriaList([Ends()])),
    "stop string": answers(stop_strings=stop, tokenizer=tokenizer),
    "static cache": answers(cache_implementation="static"),
}
results = {name: [out.tolist() for out in pair] for name, pair in results.items()}
assert len(results["end of sequence"][0][0]) < 28 and len(results["stop string"][0][0]) < 28
assert len(results["criterion"][0][0]) == 12
pair = answers(**full)
assert 1 <= pair[0].dspark.rounds <= 24
results["scores"] = [len(pair[0].scores), len(pair[1].scores)]
torch.testing.assert_close(pair[0].scores, pair[1].scores)
streamers = [Streamer(), Streamer()]
answers(fresh=lambda left=iter(streamers): {"streamer": next(left)})
results["stream"] = [streamer.parts for streamer in streamers]
assert not any(name.startswith("transformers_dspark") for name in sys.modules)
print(json.dumps(results))
'''
SAMPLES = """
import json
ids, rows = torch.tensor([[5, 17, 3, 40]]), []
for seed in range(4):
    torch.manual_seed(seed)
    out = target.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), custom_generate=sys.argv[2], trust_remote_code=True,
        assistant_model=drafter, max_new_tokens=16, do_sample=True, temperature=1.3, top_p=0.9,
    )
    rows += out.tolist()
print(json.dumps(rows))
"""
REFUSED = """
import json
ids, lines = torch.tensor([[5, 17, 3, 40], [9, 9, 21, 2]]), []
door = {"custom_generate": sys.argv[2], "trust_remote_code": True, "max_new_tokens": 4}
some = {"assistant_model": drafter, "do_sample": True}
calls = [(2, some), (1, some | {"num_return_sequences": 2}), (1, {"assistant_model": drafter, "num_beams": 2})]
for rows, more in (*calls, (1, some | {"use_cache": False}), (1, {})):
    try:
        target.generate(input_ids=ids[:rows], attention_mask=torch.ones_like(ids[:rows]), **door, **more)
    except (NotImplementedError, ValueError) as error:
        lines.append(f"{type(error).__name__}: {error}")
print(json.dumps(lines))
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> tuple[LlamaForCausalLM, Path, Path]:
    """A target, its folder, and the folder of a drafter for it."""
    root = tmp_path_factory.mktemp("repository")
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=2)).eval()
    target.generation_config.eos_token_id = target.config.eos_token_id = None
    target.save_pretrained(root / "target")
    word_tokenizer(64).save_pretrained(root / "target")
    ends = {name: getattr(target.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    heads = {"markov_rank": 8, "markov_head_type": "gated", "enable_confidence_head": True}
    config = DSparkConfig(**SHAPE, **ends, **heads, num_hidden_layers=1, target_layer_ids=[0, 1], block_size=4)
    drafter = DSparkDrafter(config).eval()
    write_repository(drafter, root / "drafter", tokenizer=word_tokenizer(64), base_model="org/target")
    return target, root / "target", root / "drafter"


def fresh(code: str, *words: object, cache: Path) -> subprocess.CompletedProcess:
    environment = {"HF_MODULES_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": ""}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, env=environment, check=False
    )


def plain(target, rows: int) -> torch.Tensor:
    ids = torch.tensor([[5, 17, 3, 40], [9, 9, 21, 2]])[:rows]
    return target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)


def test_files(repository):
    _, _, folder = repository
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {"custom_generate/generate.py", "custom_generate/requirements.txt", "README.md"} < names
    assert {"modeling_dspark.py", "configuration_dspark.py", "tokenizer.json", "model.safetensors"} < names
    assert json.loads((folder / "config.json").read_text())["auto_map"] == {
        "AutoConfig": "configuration_dspark.DSparkConfig",
        "AutoModel": "modeling_dspark.DSparkDrafter",
    }
    assert (folder / "custom_generate" / "requirements.txt").read_text() == f"{TRANSFORMERS}\n"
    needs = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["dependencies"]
    assert TRANSFORMERS in needs


def test_the_door_with_the_package(repository, tmp_path):
    target, target_folder, folder = repository
    done = fresh(OPEN + DOOR, target_folder, folder, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    for rows, line in enumerate(done.stdout.splitlines(), start=1):
        ids, rounds = json.loads(line)
        assert ids == plain(target, rows).tolist()
        assert 1 <= rounds <= 16
    assert rows == 2


@pytest.fixture(scope="module")
def alone(repository, tmp_path_factory) -> tuple[Path, list]:
    """What one process without the package printed, and the folder where it saved the drafter once more."""
    root = tmp_path_factory.mktemp("alone")
    code = WITHOUT + OPEN + PROPOSE + ALONE + SAMPLES + REFUSED
    done = fresh(code, *repository[1:], root / "saved", cache=root / "modules")
    assert done.returncode == 0, done.stderr
    return root / "saved", [json.loads(line) for line in done.stdout.splitlines()]


def test_without_the_package_the_drafter_works(repository, alone):
    target, _, folder = repository
    saved, ((tokens, total), *_) = alone
    drafter = DSparkDrafter.from_pretrained(folder).bind_target(target)
    context, taps = drafter.new_context(), torch.arange(5 * 64).reshape(1, 5, 64).float() / 320
    with torch.no_grad():
        drafter.extend_context(context, taps, torch.arange(5)[None])
        proposal = drafter.propose(torch.tensor([3]), torch.tensor([5]), context)
    assert tokens == proposal.tokens.tolist()
    assert total == pytest.approx(proposal.logits.sum().item(), abs=1e-3)
    again = DSparkDrafter.from_pretrained(saved).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in drafter.state_dict().items())


def test_without_the_package_the_door_serves_one_prompt(alone):
    """Every answer equals that of plain `generate` in the same process, for what `generate` knows of one prompt."""
    results = alone[1][1]
    assert len(results) == 10
    for name, (ours, theirs) in results.items():
        assert ours == theirs, name


def test_without_the_package_the_door_samples_as_the_package_does(repository, alone):
    """The code is the package's, whose law is tested elsewhere: same noise, same tokens."""
    target, _, folder = repository
    drafter, ids = DSparkDrafter.from_pretrained(folder), torch.tensor([[5, 17, 3, 40]])
    found = alone[1][2]
    assert len({tuple(row) for row in found}) == len(found) == 4
    for seed, row in enumerate(found):
        torch.manual_seed(seed)
        options = {"max_new_tokens": 16, "do_sample": True, "temperature": 1.3, "top_p": 0.9}
        out = target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=drafter, **options)
        assert row == out[0].tolist()


def test_without_the_package_the_door_says_what_it_does_not_serve(alone):
    rows, returned, beams, cache, draft = alone[1][3]
    assert rows == returned
    assert rows == (
        "NotImplementedError: This call has 2 rows, and the code in a drafter's repository serves one: run "
        "`pip install transformers-dspark` for any number."
    )
    assert "this call asks for beam_search" in beams
    assert "use_cache=False contradicts" in cache
    assert draft.startswith("ValueError: No drafter")


def test_the_door_in_this_process(repository):
    target, _, folder = repository
    ids = torch.tensor([[5, 17, 3, 40]])
    options = {"custom_generate": str(folder), "trust_remote_code": True, "max_new_tokens": 16, "do_sample": False}
    drafter = DSparkDrafter.from_pretrained(folder)
    for given in ({"assistant_model": drafter}, {"drafter": drafter}):
        out = target.generate(ids, attention_mask=torch.ones_like(ids), **given, **options)
        assert torch.equal(out, plain(target, 1))
    with pytest.raises(ValueError, match="No drafter"):
        target.generate(ids, **options)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("by_name", [False, True])
def test_pipelines(repository, by_name, batch_size):
    target, _, folder = repository
    tokenizer = word_tokenizer(64)
    tokenizer.padding_side = "left"
    assistant = str(folder) if by_name else DSparkDrafter.from_pretrained(folder)
    texts, written = ["t05 t17 t03", "t09", "t21 t02 t30 t31 t32", "t60 t61"], []
    for given in (None, assistant):
        pipe = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=given, device="cpu")
        answers = pipe(texts, max_new_tokens=12, do_sample=False, batch_size=batch_size)
        written.append([answer[0]["generated_text"] for answer in answers])
    assert written[0] == written[1]
    assert all(len(answer.split()) > len(text.split()) for answer, text in zip(written[1], texts, strict=True))


def test_push_to_hub(repository, tmp_path, monkeypatch):
    hub = LocalHub(tmp_path / "hub", monkeypatch)
    drafter = DSparkDrafter.from_pretrained(repository[2])
    drafter.generation_config = DSparkGenerationConfig(seed=3)
    drafter.push_to_hub("org/drafter")
    (name, files), folder = hub.commits[0], tmp_path / "hub" / "org" / "drafter"
    assert name == "org/drafter"
    assert {"README.md", "config.json", "generation_config.json", "model.safetensors"} < set(files)
    assert {"custom_generate/generate.py", "custom_generate/requirements.txt", "modeling_dspark.py"} < set(files)
    card = ModelCard.load(folder / "README.md")
    assert card.data.to_dict()["library_name"] == "transformers"
    assert {"speculative-decoding", "dspark"} <= set(card.data.tags)
    again = DSparkDrafter.from_pretrained(folder)
    assert again.generation_config.seed == 3
    assert all(torch.equal(tensor, again.state_dict()[n]) for n, tensor in drafter.state_dict().items())


def test_a_card_that_is_there_is_kept(repository, tmp_path, monkeypatch):
    """A repository written whole, with its card, uploaded; pushing again changes the weights, not the words."""
    hub = LocalHub(tmp_path / "hub", monkeypatch)
    _, target_folder, folder = repository
    (tmp_path / "results.json").write_text(json.dumps({"results": RESULTS}))
    words = ["export", str(folder), str(tmp_path / "out"), "--to", "canonical", "--push-to-hub", "org/drafter"]
    words += ["--target", str(target_folder), "--results", str(tmp_path / "results.json")]
    assert cli.main(words) == 0
    assert {"README.md", "tokenizer.json", "custom_generate/generate.py"} < set(hub.commits[0][1])
    card = (tmp_path / "hub" / "org" / "drafter" / "README.md").read_text()
    assert "| chat | 0 | 7 | 3.25 | 50% | 25% | - |" in card
    DSparkDrafter.from_pretrained(folder).push_to_hub("org/drafter")
    assert (
        ModelCard.load(tmp_path / "hub" / "org" / "drafter" / "README.md").text.strip() == ModelCard(card).text.strip()
    )


def test_cards(repository):
    config = DSparkDrafter.from_pretrained(repository[2]).config
    card = ModelCard(model_card(config, "org/drafter", "org/target", RESULTS))
    assert card.data.to_dict()["library_name"] == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    assert card.data.base_model == "org/target"
    assert card.data.tags == ["speculative-decoding", "dspark"]
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_type) == ("accepted_length", 3.25, "chat")
    for words in (
        'from_pretrained("org/drafter"',
        'custom_generate="org/drafter"',
        "gated, rank 8",
        "64 of 64 tokens",
    ):
        assert words in card.content
    bare = ModelCard(model_card(config, "drafter"))
    assert bare.data.eval_results is None
    assert "Accepted length" not in bare.content


@pytest.mark.parametrize("text", ["{", "{}", '{"results": [{"prompts": "x"}]}', '{"results": 3}'])
def test_results_of_another_kind(repository, text, tmp_path, capsys):
    (tmp_path / "results.json").write_text(text)
    words = ["export", str(repository[2]), str(tmp_path / "out"), "--to", "canonical"]
    assert cli.main([*words, "--results", str(tmp_path / "results.json")]) == 2
    error = capsys.readouterr().err
    assert "holds no results of `dspark eval --json`" in error
    assert error.count("\n") == 1
