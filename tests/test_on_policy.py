"""The target's own answers: slots that refill must not change a single token."""

import copy
import itertools
import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from transformers_dspark.attention import ATTENTION_NAME, use_ragged_attention
from transformers_dspark.cache import ragged_cache
from transformers_dspark.cli import main
from transformers_dspark.training import answers as answers_module
from transformers_dspark.training.answers import INDEX_NAME, Answer, AnswerWriter, read_answers, read_index
from transformers_dspark.training.on_policy import AnswerOptions, generate_answers, prompt_noise
from transformers_dspark.training.prompts import read_prompts
from transformers_dspark.training.self_prompts import before_user, self_prompts
from transformers_dspark.training.slots import LOOP_TOKENS, Request, SlotDecoder, draw, hashed_uniforms
from transformers_dspark.windows import RaggedWindow


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<|im_start|>", "<|im_end|>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = TEMPLATE
    return fast


def tiny(family: str):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 258,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.4,  # sharp enough that answers wander and end instead of looping at once
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    }
    made = LlamaForCausalLM(LlamaConfig(**sizes)) if family == "llama" else Qwen3ForCausalLM(Qwen3Config(**sizes))
    return made.eval()


def random_prompts(count: int, longest: int = 40):
    rng = np.random.default_rng(1)
    return [rng.integers(2, 258, size=rng.integers(1, longest)).tolist() for _ in range(count)]


def decode_all(target, prompts, slots, capacity=96, new=40, temperature=0.0, eos=(1,), steps=5):
    """Answers of prompts in order, through slots that are fewer than the prompts."""
    answers, waiting, occupied = {}, list(range(len(prompts))), {}
    with use_ragged_attention(target):
        decoder = SlotDecoder(target, slots, capacity, eos)
        while waiting or occupied:
            free = [row for row in range(slots) if row not in occupied][: len(waiting)]
            starting = [waiting.pop(0) for _ in free]
            decoder.fill(free, [Request((i, 0), prompts[i], temperature, 1000 + i, new) for i in starting])
            occupied.update(zip(free, starting, strict=True))
            decoder.run(steps)
            active, counts, _ = decoder.read()
            finished = [row for row in occupied if not active[row]]
            for row, answer in zip(finished, decoder.take(finished, counts), strict=True):
                answers[occupied.pop(row)] = answer.tolist()
    return [answers[i] for i in range(len(prompts))]


def plain_greedy(target, prompt, new):
    out = target.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=new
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("steps", [1, 7])
def test_greedy_answers_equal_generate(family, steps):
    target = tiny(family)
    prompts = random_prompts(7)
    expected = [plain_greedy(target, prompt, 20) for prompt in prompts]
    assert decode_all(target, prompts, slots=3, new=20, steps=steps) == expected
    assert target.config._attn_implementation != ATTENTION_NAME


def test_eos_ends_an_answer_and_stays_in_it():
    target = tiny("llama")
    prompts = random_prompts(5)
    eos = plain_greedy(target, prompts[0], 20)[10]
    target.generation_config.eos_token_id = eos
    expected = [plain_greedy(target, prompt, 20) for prompt in prompts]
    got = decode_all(target, prompts, slots=2, new=20, eos=(eos,))
    assert got == expected
    assert got[0][-1] == eos


def test_capacity_ends_an_answer():
    target = tiny("llama")
    prompts = [[5] * 30, [6] * 3]
    got = decode_all(target, prompts, slots=2, capacity=33, new=1000, eos=())  # rounded up to 40
    assert len(got[0]) == 10
    assert len(got[1]) == 37
    assert got[1] == plain_greedy(target, prompts[1], 37)


def test_a_loop_is_stopped_at_the_same_token_however_often_the_host_looks():
    target = tiny("llama")
    with torch.no_grad():  # a model that repeats its input for ever
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        target.lm_head.weight.copy_(target.model.embed_tokens.weight)
    for steps in (1, 13):
        (answer,) = decode_all(target, [[7, 9]], slots=1, capacity=256, new=200, eos=(), steps=steps)
        assert len(set(answer)) == 1
        assert len(answer) == LOOP_TOKENS


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_samples_depend_on_the_row_alone(family):
    target = tiny(family)
    prompts = random_prompts(7)
    wide = decode_all(target, prompts, slots=7, new=20, temperature=1.0, eos=())
    narrow = decode_all(target, prompts, slots=2, new=20, temperature=1.0, eos=(), steps=3)
    assert wide == narrow
    assert wide != decode_all(target, prompts, slots=7, new=20, eos=())


def test_draw_follows_the_distribution():
    logits = torch.tensor([[1.0, 0.0, -1.0, float("-inf"), 2.0]])
    rows = 20_000
    uniforms = hashed_uniforms(torch.full((rows,), 17), torch.arange(rows))
    assert uniforms.min() >= 0
    assert uniforms.max() < 1
    tokens = draw(logits.expand(rows, -1), torch.full((rows,), 0.7), uniforms)
    expected = (logits[0] / 0.7).softmax(-1)
    observed = torch.bincount(tokens, minlength=5) / rows
    torch.testing.assert_close(observed, expected, atol=0.012, rtol=0)
    assert (draw(logits.expand(rows, -1), torch.zeros(rows), uniforms) == 4).all()


def test_draw_never_takes_an_impossible_last_token():
    logits = torch.tensor([[0.0, 0.0, float("-inf")]])
    almost_one = torch.tensor([1 - 2.0**-24])
    assert draw(logits, torch.ones(1), almost_one).item() == 1


def test_hashed_uniforms_look_uniform():
    seeds, counts = torch.meshgrid(torch.arange(200), torch.arange(200), indexing="ij")
    uniforms = hashed_uniforms(seeds.reshape(-1), counts.reshape(-1)).double()
    assert abs(uniforms.mean() - 0.5) < 0.006
    assert abs(uniforms.var() - 1 / 12) < 0.003
    assert abs(torch.corrcoef(torch.stack([uniforms[:-1], uniforms[1:]]))[0, 1]) < 0.02


def test_prompt_noise_has_the_stated_shares():
    temperatures = [prompt_noise(3, i, 0)[0] for i in range(4000)]
    assert temperatures.count(0.0) / 4000 == pytest.approx(0.5, abs=0.03)
    assert temperatures.count(1.0) / 4000 == pytest.approx(0.25, abs=0.03)
    assert prompt_noise(3, 5, 0) == prompt_noise(3, 5, 0) != prompt_noise(3, 5, 1)


def test_attention_refuses_to_run_without_a_window():
    target = tiny("llama")
    ids = torch.tensor([[3, 4]])
    with use_ragged_attention(target):
        with pytest.raises(RuntimeError, match="ragged_window"):
            target(input_ids=ids)
        with pytest.raises(RuntimeError, match="ragged_window"):
            target(input_ids=ids, cache=ragged_cache(target.config, 1, 8))
        window = RaggedWindow(rows=torch.tensor([0]))
        with pytest.raises(ValueError, match="attention_mask"):
            target(
                input_ids=ids,
                attention_mask=torch.ones(1, 2),
                cache=ragged_cache(target.config, 1, 8),
                ragged_window=window,
            )
    target(input_ids=ids)


def test_windows_and_layers_that_cannot_be_ragged_are_refused():
    with pytest.raises(ValueError, match="either"):
        RaggedWindow()
    config = Qwen3Config(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"])
    with pytest.raises(NotImplementedError, match="sliding_attention"):
        ragged_cache(config, 1, 8)


def test_prompts_that_do_not_fit_are_refused():
    with use_ragged_attention(tiny("llama")) as target:
        decoder = SlotDecoder(target, 1, 16, [1])
        for ids in ([], [3] * 16):
            with pytest.raises(ValueError, match="capacity 16"):
                decoder.fill([0], [Request((0, 0), ids, 0.0, 0, 4)])


PROMPTS = [
    ["hello"],
    ["why is the sky blue?", "and the sea?"],
    ["x"],
    ["count to three", "shorter"],
    ["y" * 60],
    ["z" * 400],
]
OPTIONS = AnswerOptions(slots=2, capacity=240, max_new_tokens=24, seed=5, check_every=4)


def collect(folder):
    return {
        (a.prompt, a.turn): (a.ids.tolist(), a.prompt_length, a.temperature, a.finish) for a in read_answers(folder)
    }


def test_answers_on_disk(tmp_path, tokenizer):
    target = tiny("llama")
    writer = AnswerWriter(tmp_path, {"seed": 5}, 258, shard_tokens=150)
    progress = generate_answers(target, tokenizer, PROMPTS, writer, OPTIONS)
    answers = collect(tmp_path)
    assert set(answers) == {(0, 0), (1, 0), (1, 1), (2, 0), (3, 0), (3, 1), (4, 0)}
    assert (progress.answers, progress.skipped, progress.exhausted) == (7, 1, True)
    index = read_index(tmp_path)
    assert len(index["shards"]) > 1
    assert sum(shard["answer_tokens"] for shard in index["shards"]) == progress.tokens
    assert not list(tmp_path.glob("*.part"))
    for (prompt, turn), (ids, prompt_length, temperature, finish) in answers.items():
        assert temperature == pytest.approx(prompt_noise(5, prompt, turn)[0])
        assert (ids[-1] == 1) == (finish == "eos")
        assert len(ids) - prompt_length <= 24
        if temperature == 0:
            assert ids[prompt_length:] == plain_greedy(target, ids[:prompt_length], 24)
    ids, prompt_length, *_ = answers[(1, 1)]
    first_ids, first_length, *_ = answers[(1, 0)]
    text = tokenizer.decode(ids[:prompt_length])
    assert tokenizer.decode(first_ids[first_length:], skip_special_tokens=True) in text
    assert "and the sea?" in text


def test_a_resumed_run_repeats_nothing_and_changes_nothing(tmp_path, tokenizer, monkeypatch):
    target = tiny("llama")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    prompts = [[f"prompt {i}"] for i in range(9)]
    generate_answers(target, tokenizer, prompts, AnswerWriter(whole, {}, 258), OPTIONS)

    writer = AnswerWriter(parts, {}, 258, shard_tokens=90)
    adds = itertools.count()
    plain_add = writer.add

    def failing_add(answer):
        if next(adds) == 5:
            raise KeyboardInterrupt
        plain_add(answer)

    monkeypatch.setattr(writer, "add", failing_add)
    with pytest.raises(KeyboardInterrupt):
        generate_answers(target, tokenizer, prompts, writer, OPTIONS)
    assert target.config._attn_implementation != ATTENTION_NAME
    kept = len(collect(parts))
    assert 0 < kept < 9

    resumed = AnswerWriter(parts, {}, 258, shard_tokens=90)
    assert len(resumed.done) == kept
    progress = generate_answers(target, tokenizer, prompts, resumed, OPTIONS)
    assert progress.answers == 9 - kept
    assert len(list(read_answers(parts))) == 9
    assert collect(parts) == collect(whole)


def test_an_interrupted_run_loses_no_answer_and_restores_the_target(tmp_path, tokenizer):
    target = tiny("llama").train()
    writer = AnswerWriter(tmp_path, {}, 258)

    def interrupt(progress):
        if progress.answers >= 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate_answers(target, tokenizer, PROMPTS, writer, OPTIONS, interrupt, report_every=0.0)
    assert target.training
    assert len(writer.done) >= 3
    assert set(collect(tmp_path)) == writer.done


def test_a_flush_that_was_interrupted_can_be_repeated(tmp_path, monkeypatch):
    writer = AnswerWriter(tmp_path, {}, 258)
    writer.add(Answer(0, 0, np.arange(5), 2, 0.0, "eos"))
    replace = answers_module._replace

    def interrupted(path, write):
        if path.name == INDEX_NAME:
            raise KeyboardInterrupt
        replace(path, write)

    with monkeypatch.context() as context:
        context.setattr(answers_module, "_replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.flush()
    writer.flush()
    assert len(list(read_answers(tmp_path))) == 1


def test_answers_are_written_by_time_as_well(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(answers_module.time, "monotonic", lambda: now[0])
    writer = AnswerWriter(tmp_path, {}, 258)
    for number, (seconds, shards) in enumerate([(100, 0), (119, 1), (119, 1), (1, 2)]):
        now[0] += seconds
        writer.add(Answer(number, 0, np.arange(5), 2, 0.0, "eos"))
        assert len(writer.shards) == shards


def test_a_run_out_of_time_keeps_what_it_has(tmp_path, tokenizer):
    options = AnswerOptions(slots=2, capacity=240, seed=5, check_every=3, max_seconds=0.0)
    writer = AnswerWriter(tmp_path, {}, 258)
    progress = generate_answers(tiny("llama"), tokenizer, PROMPTS, writer, options)
    assert progress.answers == 2
    assert {finish for *_, finish in collect(tmp_path).values()} == {"cut"}


@pytest.mark.parametrize("terminal", [False, True])
def test_the_command(tmp_path, tokenizer, capsys, monkeypatch, terminal):
    monkeypatch.setattr("rich.console.Console.is_terminal", terminal)
    tiny("llama").save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"turns": ["{letter}"]}}\n' for letter in "abcd"))
    words = ["data", "answers", "--target", f"{tmp_path}/target", "--prompts", f"{tmp_path}/prompts.jsonl"]
    words += ["--out", f"{tmp_path}/answers", "--slots", "2", "--capacity", "128", "--json", f"{tmp_path}/a.json"]
    for limit, answers in ((3, 3), (4, 1)):
        assert main([*words, "--limit", str(limit), "--device", "cpu"]) == 0
        assert json.loads((tmp_path / "a.json").read_text())["answers"] == answers
    shown = capsys.readouterr().out
    assert "already holds 3 answers" in shown
    assert shown.count("all prompts are answered") == 2
    assert ("\x1b[" in shown) == terminal


def test_other_settings_are_refused(tmp_path, tokenizer):
    writer = AnswerWriter(tmp_path, {"seed": 5}, 258)
    generate_answers(tiny("llama"), tokenizer, [["a"]], writer, OPTIONS)
    with pytest.raises(ValueError, match="other settings"):
        AnswerWriter(tmp_path, {"seed": 6}, 258)


def chatty():
    """A tiny target that ends what it says now and then, and speaks in letters."""
    target = tiny("llama")
    allowed = torch.full((258,), float("-inf"))
    allowed[2:96] = 0.0  # printable ASCII
    allowed[1] = 2.0
    target.lm_head.register_forward_hook(lambda head, args, logits: logits + allowed)
    return target


def test_prompts_that_the_target_writes_itself(tokenizer):
    target = chatty()
    start = before_user(tokenizer)
    assert tokenizer.decode(start) == "<|im_start|>user\n"
    first, again, fewer_slots = (
        list(itertools.islice(self_prompts(target, tokenizer, seed=3, slots=slots, most_tokens=48), 12))
        for slots in (16, 16, 4)
    )
    assert first == again
    texts = {text for (text,) in first}
    assert len(texts) > 6
    assert all(len(text) >= 8 and "<|im" not in text for text in texts)
    assert texts & {text for (text,) in fewer_slots}  # the same draws, finished in another order
    other = list(itertools.islice(self_prompts(target, tokenizer, seed=4, slots=16, most_tokens=48), 12))
    assert not texts & {text for (text,) in other}


def test_a_template_without_the_users_words_is_refused(tokenizer):
    hidden = copy.deepcopy(tokenizer)
    hidden.chat_template = "{% for m in messages %}{{ m['content'] | upper | reverse | list | length }}{% endfor %}"
    with pytest.raises(ValueError, match="chat template"):
        before_user(hidden)


def test_a_target_that_writes_no_prompts_is_refused(tokenizer, monkeypatch):
    monkeypatch.setattr("transformers_dspark.training.self_prompts.MOST_MISSES", 20)
    with pytest.raises(ValueError, match="20 draws in a row"):
        list(self_prompts(tiny("llama"), tokenizer, slots=8, most_tokens=16))


def test_the_command_for_prompts_from_the_target(tmp_path, tokenizer, capsys, monkeypatch):
    tiny("llama").save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda path, dtype: chatty())
    words = ["data", "prompts", "--from-target", f"{tmp_path}/target", "--slots", "8", "--count", "6"]
    assert main([*words, "--device", "cpu", "--out", f"{tmp_path}/p.jsonl.gz"]) == 0
    assert len(read_prompts(tmp_path / "p.jsonl.gz")) == 6
    assert "6  self" in capsys.readouterr().out
