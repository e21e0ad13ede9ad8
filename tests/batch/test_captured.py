"""
The loop of captured rounds. On this device a graph's replay calls the round again: buffers that outlive a call,
results that are read a round late, rows that are taken out and the choice of sizes are the same as on a GPU.
"""

import copy
import gc
import weakref
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from transformers import CompileConfig, MaxTimeCriteria, TextStreamer
from transformers.generation import EosTokenCriteria

from transformers_dspark import DSparkGenerationConfig, captured, captured_loop, decoding, ragged_ops
from transformers_dspark.cache import RaggedLayer
from transformers_dspark.graphs import Graph
from transformers_dspark.quicker import COMPILED
from transformers_dspark.round_size import tiers
from transformers_dspark.target import TargetTaps

from .conftest import ragged, texts_of
from .test_modes import unsure
from .test_turns import padded, second_turn


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    monkeypatch.setattr(captured, "_reason_against_device", lambda target, drafter: None)


def config(**options):
    options = {"do_sample": False, "max_new_tokens": 20, "return_dict_in_generate": True, **options}
    return DSparkGenerationConfig(**{"use_cuda_graphs": True, "dspark_loop": "batched", **options})


def play(target, drafter, ids, mask, **options):
    return target.generate(ids, attention_mask=mask, assistant_model=drafter, generation_config=config(**options))


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt-oss"])
@pytest.mark.parametrize("rows", [1, 5])
def test_greedy_is_plain_generation(lab, kind, rows):
    """In one call after another: what the first leaves behind serves the second, which is another batch."""
    target, drafter = lab.target(kind), lab.knowing([], block_size=4)
    held = None
    for seed, length in ((3, 9), (8, 12)):
        ids, mask = ragged(rows, length, seed)
        free = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=20)
        eos = [int(free[0, length + 5]), int(free[-1, length + 12])]
        plain = target.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=20, eos_token_id=eos, pad_token_id=0
        )
        drafter.script = texts_of(free, mask)
        ours = play(target, drafter, ids, mask, eos_token_id=eos, pad_token_id=0)
        assert torch.equal(ours.sequences, plain)
        assert drafter.captured is (held or drafter.captured)
        held = drafter.captured
        for row, lengths in enumerate(ours.dspark.accepted_lengths):
            ended = [i for i, token in enumerate(plain[row, length:].tolist()) if token in eos]
            assert 1 + sum(lengths) == min([20, *(i + 1 for i in ended)])
        assert all(max(lengths) > 1 for lengths in ours.dspark.accepted_lengths if sum(lengths) > 9)


OPTIONS = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.7},
    "processors": {"do_sample": True, "top_k": 9, "top_p": 0.9, "repetition_penalty": 1.2},
    "end": {"do_sample": True, "eos_token_id": [7, 30, 21], "pad_token_id": 0},
    "narrow": {"max_verify_tokens": 2, "do_sample": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_draws_what_the_other_loop_draws(lab, options):
    target, drafter, (ids, mask) = lab.target(), lab.drafter(), ragged(4)
    options = {"seed": [3, 1, 4, 15], "max_new_tokens": 90, **options}
    plain = play(target, drafter, ids, mask, use_cuda_graphs=False, **options)
    assert drafter.captured is None
    ours = play(target, drafter, ids, mask, **options)
    assert torch.equal(ours.sequences, plain.sequences)
    for name in ("accepted_lengths", "verify_lengths", "tested_by_position", "passed_by_position"):
        assert getattr(ours.dspark, name) == getattr(plain.dspark, name), name


@pytest.mark.parametrize("do_sample", [False, True])
def test_compact(lab, do_sample):
    """The budget comes from older confidences; greedy, the text stays that of plain decoding."""
    target, (ids, mask) = lab.target(), ragged(6)
    plain = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=40)
    drafter = unsure(lab.knowing(texts_of(plain, mask)))
    ours = play(
        target, drafter, ids, mask, step_cost_table=lab.table(), max_new_tokens=40, do_sample=do_sample, seed=1
    )
    assert do_sample or torch.equal(ours.sequences, plain)
    assert len({length for lengths in ours.dspark.verify_lengths for length in lengths}) > 1
    assert ours.dspark.schedule is not None


def test_rows_for_which_drafting_does_not_pay(lab):
    target, (ids, mask) = lab.target(), ragged(3)
    plain = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=60)
    drafter = lab.drafter(enable_confidence_head=True)
    ours = play(target, drafter, ids, mask, step_cost_table=lab.table(per_token=50.0, draft=9.0), max_new_tokens=60)
    assert torch.equal(ours.sequences, plain)
    assert ours.dspark.schedule["gated_rows"] > 0 if "gated_rows" in ours.dspark.schedule else ours.dspark.schedule
    assert any(length == 0 for length in ours.dspark.verify_lengths[0])


def test_rounds_shrink_with_the_rows(lab, monkeypatch):
    target, (ids, mask) = lab.target(), ragged(7)
    free = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=40)
    eos = sorted({int(free[row, 9 + 5 * row]) for row in range(6)})
    plain = target.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=40, eos_token_id=eos, pad_token_id=0
    )
    sizes, graph = [], captured_loop.CapturedRounds.graph
    monkeypatch.setattr(
        captured_loop.CapturedRounds,
        "graph",
        lambda self, rows, *args, **options: sizes.append(rows) or graph(self, rows, *args, **options),
    )
    drafter = lab.knowing(texts_of(free, mask), block_size=4)
    ours = play(target, drafter, ids, mask, max_new_tokens=40, eos_token_id=eos, pad_token_id=0, do_sample=False)
    assert torch.equal(ours.sequences, plain)
    assert sizes[0] > 4  # some end with their first token
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] <= 2


def test_the_cache_that_is_returned_is_the_callers(lab):
    target, drafter, (ids, mask) = lab.target(), lab.drafter(), ragged(3)
    first = play(target, drafter, ids, mask)
    other = ragged(3, seed=5)
    play(target, drafter, *other)  # writes over what the first call worked on
    ids, mask = padded(second_turn(first.sequences, mask, (1, 7, 4)))
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 12}
    plain = target.generate(ids, **options)
    assert torch.equal(target.generate(ids, cache=first.cache, assistant_model=drafter, **options), plain)


def second_turn_is_plain(target, drafter, first):
    ids, mask = padded([[*text.tolist(), 5, 9, 11] for text in first.cache.ids])
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 12}
    plain = target.generate(ids, **options)
    assert torch.equal(target.generate(ids, cache=first.cache, assistant_model=drafter, **options), plain)


def test_a_returned_cache_of_texts_that_ended_early(lab):
    """Smaller rounds put tokens of no row where such a text had its entries."""
    target, (ids, mask) = lab.target(), ragged(7)
    free = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=30)
    eos = [int(row[ids.shape[1] + 1 + 3 * i]) for i, row in enumerate(free[:-1])]
    drafter = lab.knowing(texts_of(free, mask), block_size=4)
    first = play(target, drafter, ids, mask, max_new_tokens=30, eos_token_id=eos, pad_token_id=0)
    second_turn_is_plain(target, drafter, first)


def test_graphs_without_the_compiler_where_it_fails(lab, monkeypatch, caplog):
    class WarmedUp(Graph):
        def __init__(self, work, *args):
            work()
            super().__init__(work, *args)

    def broken(graph, inputs):
        raise ValueError("no such graph")

    monkeypatch.setattr(captured, "Graph", WarmedUp)
    target, drafter, (ids, mask) = lab.target(), lab.drafter(), ragged(3)
    plain = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=20)
    compiling = CompileConfig(backend=broken)
    for _ in range(2):
        ours = play(target, drafter, ids, mask, max_new_tokens=20, compile_config=compiling)
        assert torch.equal(ours.sequences, plain)
    assert drafter.captured.failure is None
    assert [line for line in caplog.messages if "without compiling" in line and "no such graph" in line]


def test_the_oldest_graph_goes(lab, monkeypatch):
    monkeypatch.setattr(captured, "MOST_GRAPHS", 2)
    target, drafter, (ids, mask) = lab.target(), lab.drafter(), ragged(2)
    texts = [
        play(target, drafter, ids, mask, do_sample=True, seed=1, temperature=temperature, eos_token_id=None).sequences
        for temperature in (0.5, 0.7, 0.9, 0.5)
    ]
    assert torch.equal(texts[0], texts[3])
    assert len(drafter.captured._graphs) <= 2
    assert drafter.captured.count >= 4


@pytest.mark.parametrize(
    "chosen", [{"backend": "nosuch"}, {"options": {"no_such_option": 1}}, {"mode": None, "backend": "eager"}], ids=str
)
def test_unusual_compile_configs(lab, chosen, caplog):
    target, drafter, (ids, mask) = lab.target(), lab.drafter(), ragged(2)
    plain = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=9)
    ours = play(target, drafter, ids, mask, max_new_tokens=9, compile_config=CompileConfig(**chosen))
    assert torch.equal(ours.sequences, plain)
    assert ("without compiling" in caplog.text) == ("mode" not in chosen)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # raised by PEFT
def test_adapters_that_the_target_does_not_know_of(lab):
    """Which may be switched off between two calls, and a graph would not notice."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM")
    target = peft.get_peft_model(copy.deepcopy(lab.target()), lora).eval()
    drafter, (ids, mask) = lab.drafter(), ragged(2)
    for _ in range(2):
        plain = target.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=9)
        options = {"assistant_model": drafter, "generation_config": config(use_cuda_graphs="auto", max_new_tokens=9)}
        assert torch.equal(target.generate(input_ids=ids, attention_mask=mask, **options).sequences, plain)
        assert drafter.captured is None
        target.base_model.disable_adapter_layers()


def test_streamer(lab, capsys):
    class Words:
        def decode(self, ids, **kwargs):
            return "".join(f"{int(i)} " for i in ids)

    target, drafter, (ids, mask) = lab.target(), lab.drafter(), ragged(1)
    plain = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=20)
    target.generate(
        ids,
        attention_mask=mask,
        assistant_model=drafter,
        generation_config=config(return_dict_in_generate=False),
        streamer=TextStreamer(Words()),
    )
    assert capsys.readouterr().out.split() == [str(i) for i in plain[0].tolist()]


def test_time_is_up(lab):
    target, drafter, (ids, mask) = lab.target(), lab.drafter(), ragged(2)
    ours = target.generate(
        ids,
        attention_mask=mask,
        assistant_model=drafter,
        generation_config=config(max_new_tokens=400),
        stopping_criteria=[MaxTimeCriteria(1e-9)],
    )
    assert ours.sequences.shape[1] < ids.shape[1] + 400
    plain = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=400)
    assert torch.equal(ours.sequences, plain[:, : ours.sequences.shape[1]])


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"output_scores": True}, "scores"),
        ({"no_repeat_ngram_size": 3}, "processor"),
        ({"round_callback": print}, "reported"),
        ({"assistant_confidence_threshold": 0.5}, "assistant_confidence_threshold"),
    ],
)
def test_what_cannot_be_captured(lab, options, word):
    target, drafter, (ids, mask) = lab.target(), lab.drafter(enable_confidence_head=True), ragged(2)
    with pytest.raises(NotImplementedError, match=word):
        play(target, drafter, ids, mask, **options)
    play(target, drafter, ids, mask, use_cuda_graphs="auto", **options)
    assert drafter.captured is None


def test_graphs_that_cannot_be_had_are_refused(lab):
    target, drafter, (ids, mask) = lab.target(), lab.drafter(), ragged(1)
    with pytest.raises(ValueError, match="dspark_loop='transformers'"):
        play(target, drafter, ids, mask, dspark_loop="transformers")
    first = play(target, drafter, ids, mask, dspark_loop="auto")  # one prompt, and captured all the same
    assert drafter.captured is not None
    again = {"attention_mask": torch.ones_like(first.sequences), "cache": first.cache, "assistant_model": drafter}
    with pytest.raises(NotImplementedError, match="cache of an earlier call"):
        target.generate(first.sequences, generation_config=config(), **again)
    target.generate(first.sequences, generation_config=config(use_cuda_graphs="auto"), **again)


def test_new_weights_are_seen(lab):
    target, drafter, (ids, mask) = copy.deepcopy(lab.target()), lab.drafter(), ragged(2)
    play(target, drafter, ids, mask)
    held = drafter.captured
    target.lm_head.weight = torch.nn.Parameter(-target.lm_head.weight.detach().clone())
    plain = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=20)
    assert torch.equal(play(target, drafter, ids, mask).sequences, plain)
    assert drafter.captured is not held


def test_a_call_that_fails_gives_all_back(lab):
    target, drafter, (ids, mask) = lab.target(), lab.drafter(), ragged(2)
    broken = copy.deepcopy(target)
    torch.nn.init.constant_(broken.lm_head.weight, float("nan"))
    with pytest.raises(ValueError, match="no token to choose"):
        play(broken, drafter, ids, mask)
    plain = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=20)
    assert torch.equal(play(target, drafter, ids, mask).sequences, plain)


def test_padding_is_no_token_of_the_text(lab):
    """A penalty ignores the padding of the row that is in a place now, not of one in an earlier call or round."""
    target, drafter = lab.target(), lab.drafter()
    options = {"do_sample": False, "max_new_tokens": 12, "repetition_penalty": 3.0, "pad_token_id": 0}
    for length in (3, 9):
        ids, mask = ragged(5, length)
        free = target.generate(ids, attention_mask=mask, **options)
        eos = [int(free[0, length]), int(free[1, length + 2])]
        for token in free[-1, length + 3 : length + 6].tolist():  # padding that the text has a use for
            filled = torch.where(mask.bool(), ids, token)
            plain = target.generate(filled, attention_mask=mask, eos_token_id=eos, **options)
            assert torch.equal(play(target, drafter, filled, mask, eos_token_id=eos, **options).sequences, plain)


def test_a_criterion_for_other_ends(lab):
    """One of the caller's takes the place of the call's own."""
    target, (ids, mask) = lab.target(), ragged(3)
    free = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=20)
    drafter = lab.knowing(texts_of(free, mask), block_size=4)
    ends = [EosTokenCriteria([int(free[0, 14]), int(free[1, 16])])]
    options = {"eos_token_id": int(free[2, 12]), "pad_token_id": 0}
    plain = target.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=20, stopping_criteria=ends, **options
    )
    ours = target.generate(
        ids,
        attention_mask=mask,
        assistant_model=drafter,
        generation_config=config(**options),
        stopping_criteria=ends,
    )
    assert torch.equal(ours.sequences, plain)


def test_blocks_of_another_size(lab):
    """Nothing of before fits them: neither what the drafter holds nor a cache that was returned."""
    target, drafter, (ids, mask) = lab.target(), lab.drafter(), ragged(2)
    for size in (4, 2, 7):
        drafter.config.block_size = size
        first = play(target, drafter, ids, mask, max_new_tokens=9)
        drafter.config.block_size = size + 3
        texts = padded(second_turn(first.sequences, mask, (1, 2)))
        options = {"attention_mask": texts[1], "do_sample": False, "max_new_tokens": 9}
        ours = target.generate(texts[0], cache=first.cache, assistant_model=drafter, **options)
        assert torch.equal(ours, target.generate(texts[0], **options))


def test_calls_in_inference_mode_and_others(lab):
    target, drafter, (ids, mask) = lab.target(), lab.drafter(), ragged(2)
    with torch.inference_mode():
        first = play(target, drafter, ids, mask).sequences
    assert torch.equal(play(target, drafter, ids, mask).sequences, first)


class WarmedUp(Graph):
    """A graph whose work is done once while it is made, as a capture does it."""

    def __init__(self, work, device, pool=None):
        super().__init__(work, device, pool)
        work()


@pytest.mark.slow
@pytest.mark.parametrize("taps", [[0, 1], [0, 2]], ids=["early", "last"])
def test_compiled_once(lab, monkeypatch, taps):
    """The kernels' operators, with their references, in a compiled target; any number of rows and tokens."""
    monkeypatch.setattr(ragged_ops, "served", lambda tensor: True)
    monkeypatch.setattr(decoding, "few_rows_linears", lambda *models: nullcontext())  # for a CPU alone
    monkeypatch.setattr(captured, "Graph", WarmedUp)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    target, drafter = copy.deepcopy(lab.target()), lab.drafter(target_layer_ids=taps)
    compiling = CompileConfig(backend="aot_eager", fullgraph=True)
    uncompiled, step = [], TargetTaps.step

    def watched(taps, ids, *args, quick=True):
        if not quick:
            uncompiled.append(len(ids))
        return step(taps, ids, *args, quick=quick)

    monkeypatch.setattr(TargetTaps, "step", watched)
    for rows, length in ((3, 9), (2, 2), (2, 40), (6, 9)):
        ids, mask = ragged(rows, length)
        plain = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=12)
        ours = play(target, drafter, ids, mask, max_new_tokens=12, compile_config=compiling)
        assert torch.equal(ours.sequences, plain)
    assert uncompiled == [3 * 5, 6 * 5]  # new buffers are made in the form of a round; prompts are compiled
    parts = 1 + len(COMPILED) + 3  # of a round: the walk over a block, the plan, the end
    assert parts <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= parts + 2  # one row is a case of its own


@pytest.mark.parametrize("error", [RuntimeError("no such thing"), torch.OutOfMemoryError("no memory")], ids=str)
def test_prompts_that_the_compiled_step_cannot_read(lab, monkeypatch, caplog, error):
    """They are read by the target itself; but where memory runs out, that is what the caller learns."""
    step = TargetTaps.step

    def failing(taps, *args, quick=True):
        if quick and taps.forward is not lab.target():
            raise error
        return step(taps, *args, quick=quick)

    monkeypatch.setattr(TargetTaps, "step", failing)
    target, drafter, (ids, mask) = lab.target(), lab.drafter(), ragged(3)
    options = {"max_new_tokens": 20, "compile_config": CompileConfig(backend="eager")}
    if isinstance(error, torch.OutOfMemoryError):
        with pytest.raises(torch.OutOfMemoryError, match="no memory"):
            play(target, drafter, ids, mask, **options)
        return
    plain = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=20)
    assert torch.equal(play(target, drafter, ids, mask, **options).sequences, plain)
    assert "without compiling the rounds of this pair: RuntimeError: no such thing" in caplog.text
    assert drafter.captured.failure is None


@pytest.mark.parametrize("first", [0, 1, 2])
def test_goes_on_without_graphs_where_a_capture_fails(lab, monkeypatch, first):
    """At the first round, or when rows are taken out; later calls do not try again."""
    made = []

    class Failing(Graph):
        def __init__(self, *args):
            if len(made) >= first:
                raise RuntimeError("no such thing")
            made.append(self)
            super().__init__(*args)

    monkeypatch.setattr(captured, "Graph", Failing)
    target, (ids, mask) = lab.target(), ragged(7)
    free = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=40)
    eos = sorted({int(free[row, 9 + 5 * row]) for row in range(6)})
    options = {"max_new_tokens": 40, "eos_token_id": eos, "pad_token_id": 0}
    plain = target.generate(ids, attention_mask=mask, do_sample=False, **options)
    drafter = lab.knowing(texts_of(free, mask), block_size=4)
    with pytest.raises(RuntimeError, match="no such thing"):
        play(target, drafter, ids, mask, **options)
    drafter.captured, made[:] = None, []
    for _ in range(2):
        ours = play(target, drafter, ids, mask, use_cuda_graphs="auto", **options)
        assert torch.equal(ours.sequences, plain)
        assert len(made) == first
    with pytest.raises(NotImplementedError, match="no such thing"):
        play(target, drafter, ids, mask, **options)


def test_tiers():
    assert tiers(1, 7) == [1, 2, 3, 4, 5, 6, 7, 8]
    for rows, width in ((1, 1), (5, 3), (64, 7), (256, 16)):
        found = tiers(rows, width)
        assert found[0] == rows
        assert found[-1] == rows * (width + 1)
        assert all(a < b <= max(a + 1, 1.26 * a) for a, b in pairwise(found))


def test_calls_of_two_kinds_share_their_buffers(lab, monkeypatch):
    """What was too small is doubled, and what another call needs is kept, as far as memory is free."""
    target, drafter = lab.target(), lab.drafter()

    def call(rows, new):
        ids, mask = ragged(rows)
        settings, over = config(max_new_tokens=new), [MaxTimeCriteria(1e-9)]
        drafted = {"assistant_model": drafter, "generation_config": settings, "stopping_criteria": over}
        target.generate(ids, attention_mask=mask, **drafted)
        return drafter.captured.room

    calls = [(1, 300), (1, 700), (1, 30), (1, 1100), (1, 1900), (4, 20), (1, 1500), (5, 20)]
    grown = [(1, 512), *[(1, 1024)] * 2, *[(1, 2048)] * 2, *[(4, 2048)] * 2, (8, 2048)]
    assert [call(*one) for one in calls] == grown
    held = drafter.captured.cache.nbytes
    assert held > 9 * 2048 * 2 * target.config.num_hidden_layers * target.config.hidden_size
    for free, tokens, room in ((1.3, 400, (9, 2048)), (0.9, 2100, (9, 2304)), (0.0, 2400, (9, 2560))):
        monkeypatch.setattr(captured, "free_memory", lambda device, free=free: free * held)
        assert call(9, tokens) == room  # all that there was, and nothing doubled; no more than is asked


def test_memory_that_runs_out(lab, monkeypatch):
    """Before anything is generated; and a smaller call later finds what it needs."""
    target, drafter, made = lab.target(), lab.drafter(), RaggedLayer.lazy_initialization

    def small(layer, keys, values):
        if layer.capacity > 512:
            raise torch.OutOfMemoryError("no memory")
        made(layer, keys, values)

    monkeypatch.setattr(RaggedLayer, "lazy_initialization", small)
    ids, mask = ragged(1)
    first, shown = play(target, drafter, ids, mask).sequences, []
    with pytest.raises(torch.OutOfMemoryError):
        target.generate(
            ids,
            attention_mask=mask,
            assistant_model=drafter,
            generation_config=config(max_new_tokens=600),
            streamer=SimpleNamespace(put=shown.append),
        )
    assert len(shown) == 1  # the prompt
    assert drafter.captured is None
    assert torch.equal(play(target, drafter, ids, mask).sequences, first)


def test_a_capture_that_runs_out_of_memory_is_tried_again(lab, monkeypatch):
    def starved(*args):
        try:
            raise torch.OutOfMemoryError("no memory")
        finally:
            raise RuntimeError("the capture was ended")  # which is what a capture says of any error in it

    target, drafter, (ids, mask) = lab.target(), lab.drafter(), ragged(2)
    with monkeypatch.context() as patched:
        patched.setattr(captured, "Graph", starved)
        first = play(target, drafter, ids, mask, use_cuda_graphs="auto").sequences
    assert drafter.captured is None
    assert torch.equal(play(target, drafter, ids, mask).sequences, first)
    assert drafter.captured.count > 0


def test_old_buffers_make_room_for_new_ones(lab):
    """At once: nothing waits for the collector of cycles."""
    target, drafter, (ids, mask) = lab.target(), lab.drafter(), ragged(1)
    play(target, drafter, ids, mask)
    old = weakref.ref(drafter.captured.cache)
    gc.disable()
    try:
        play(target, drafter, *ragged(2))
    finally:
        gc.enable()
    assert old() is None
