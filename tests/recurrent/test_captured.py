"""
Captured rounds of targets with recurrent states. On this device a graph's replay calls the round again; shapes, places
of states and what is decided by tensors alone are the same as on a GPU.
"""

import copy
from contextlib import nullcontext

import pytest
import torch
from transformers import CompileConfig, MaxTimeCriteria

from tests.batch.conftest import ragged, texts_of
from tests.batch.test_captured import WarmedUp, config, play, second_turn_is_plain
from tests.batch.test_static_round import InStaticRounds, NothingReadBack
from tests.batch.test_turns import padded, second_turn
from transformers_dspark import captured, captured_loop, decoding, ragged_ops
from transformers_dspark.cache import RaggedCache
from transformers_dspark.graphs import Graph
from transformers_dspark.mixers import mixers
from transformers_dspark.quicker import COMPILED
from transformers_dspark.window_layers import missing_windows
from transformers_dspark.windows import VerifyWindow

from .families import RECURRENT
from .sweep import RecurrentLab, gap_between, plain_states


EAGER = {"mamba", "falcon-mamba", "jamba", "zamba", "zaya"}  # their states are seen behind the last token alone
CAPTURED = [kind for kind in RECURRENT if kind not in EAGER]
QUICK = ("qwen3-next", "lfm2", "kimi-linear", "mamba2", "nemotron-h", "falcon-h1")


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


KINDS = [kind if kind in QUICK else slow(kind) for kind in CAPTURED]


@pytest.fixture(scope="module")
def lab():
    return RecurrentLab()


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    monkeypatch.setattr(captured, "_reason_against_device", lambda target, drafter: None)


def ends(target, ids, mask, new=24):
    """What plain generation gives without an end, and tokens with which the first rows end at different times."""
    free = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=new)
    start = ids.shape[1]
    eos = sorted({int(row[start + (3 + 5 * i) % new]) for i, row in enumerate(free[:-1])})
    return free, {"eos_token_id": eos or None, "pad_token_id": 0}


def plays_plain_text(lab, kind, rows, block, new=24):
    target = lab.target(kind)
    drafter = lab.knowing([], block_size=block)
    for seed, length in ((3, 9), (8, 12)):  # the second call finds what the first one left
        ids, mask = ragged(rows, length, seed)
        free, options = ends(target, ids, mask, new)
        plain = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=new, **options)
        drafter.script, drafter.rounds = texts_of(free, mask), seed
        ours = play(target, drafter, ids, mask, max_new_tokens=new, **options)
        assert torch.equal(ours.sequences, plain)
        assert drafter.captured.count > 0
        assert set(ours.dspark.reread_tokens) <= {0}
    return ours


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_is_plain_generation(lab, kind):
    plays_plain_text(lab, kind, 5, 2 + CAPTURED.index(kind) % 7)


@pytest.mark.parametrize("kind", [slow(kind) for kind in CAPTURED])
def test_every_block_and_one_row(lab, kind):
    for block in range(1, 9):
        for rows in (1, 4):
            plays_plain_text(lab, kind, rows, block)


def states_follow_plain_decoding(lab, kind, block, budgets):
    """After every round, however far its rows have gone. Returns the slots at which drafts were rejected."""
    target, (ids, mask), new = lab.target(kind), ragged(3, 9), 24
    plain = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=new)
    texts = texts_of(plain, mask)
    expected = [plain_states(target, text[:-new], text) for text in texts]
    gaps, rejected = [], set()

    class Watched(InStaticRounds):
        def played(self, batch, state, result):
            entries = state.entries.tolist()
            batch.cache.recurrent.settled[: len(entries)] = entries
            for row, (count, kept, sent) in enumerate(zip(entries, result.kept, result.sent, strict=True)):
                for index, layer in batch.cache.recurrent.states(row, count).items():
                    for name, found in expected[row][count][index].items():
                        gaps.extend(gap_between(getattr(layer, name)[n], state) for n, state in found.items())
                if 0 < kept <= sent:
                    rejected.add(int(kept) - 1)

    drafter = lab.knowing(texts, block_size=block)
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": new}
    ours = target.generate(ids, custom_generate=Watched(*budgets), drafter=drafter, **options)
    assert torch.equal(ours, plain)
    assert len(gaps) > 20
    assert max(gaps) < 1e-4
    return rejected


SOME, ALL = (0, 3, 1, 9), (40,)


@pytest.mark.parametrize(
    ("kind", "budgets"),
    [
        ("qwen3.5-multimodal", ALL),
        ("lfm2", SOME),
        ("nemotron-h", SOME),
        *(slow(kind, budgets) for kind in ("qwen3.5", "kimi-linear", "mamba2", "zamba2") for budgets in (SOME, ALL)),
    ],
    ids=str,
)
def test_states_are_those_of_plain_decoding(lab, kind, budgets):
    """Windows shorter than a block, and none at all, too."""
    rejected = states_follow_plain_decoding(lab, kind, 4, budgets)
    assert budgets == SOME or rejected == set(range(4))


@pytest.mark.slow
@pytest.mark.parametrize("kind", CAPTURED)
def test_states_of_every_block(lab, kind):
    for block in range(1, 9):
        assert len(states_follow_plain_decoding(lab, kind, block, (40,))) >= min(block, 4)


@pytest.mark.parametrize("kind", ["qwen3.5", slow("mamba2")])
def test_draws_what_the_other_loop_draws(lab, kind):
    target, drafter, (ids, mask) = lab.target(kind), lab.drafter(), ragged(3)
    options = {"do_sample": True, "seed": [3, 1, 4], "max_new_tokens": 30, "eos_token_id": [7, 30], "pad_token_id": 0}
    options |= {"top_k": 9, "top_p": 0.9, "repetition_penalty": 1.2}
    plain = play(target, drafter, ids, mask, use_cuda_graphs=False, **options)
    assert drafter.captured is None
    ours = play(target, drafter, ids, mask, **options)
    assert torch.equal(ours.sequences, plain.sequences)
    assert ours.dspark.accepted_lengths == plain.dspark.accepted_lengths


def test_compact(lab):
    target, (ids, mask) = lab.target("qwen3.5"), ragged(4)
    plain = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=24)
    drafter = lab.knowing(texts_of(plain, mask))
    ours = play(target, drafter, ids, mask, step_cost_table=lab.table(per_token=0.5), max_new_tokens=24)
    assert torch.equal(ours.sequences, plain)
    assert len({length for lengths in ours.dspark.verify_lengths for length in lengths}) > 1


@pytest.mark.parametrize("kind", ["qwen3.5", slow("lfm2")])
def test_states_move_with_their_rows(lab, kind, monkeypatch):
    sizes, graph = [], captured_loop.CapturedRounds.graph
    monkeypatch.setattr(
        captured_loop.CapturedRounds,
        "graph",
        lambda self, rows, *args, **options: sizes.append(rows) or graph(self, rows, *args, **options),
    )
    plays_plain_text(lab, kind, 7, 4, new=32)
    assert len(set(sizes)) > 2


@pytest.mark.parametrize(("kind", "first"), [("qwen3.5", 0), ("zamba2", 1), slow("qwen3.5", 1), slow("zamba2", 0)])
def test_goes_on_without_graphs_where_a_capture_fails(lab, kind, monkeypatch, first):
    """The other loop takes the states over, whether its mixers read windows or token by token."""
    made = []

    class Failing(Graph):
        def __init__(self, *args):
            if len(made) >= first:
                raise RuntimeError("no such thing")
            made.append(self)
            super().__init__(*args)

    monkeypatch.setattr(captured, "Graph", Failing)
    target, (ids, mask) = lab.target(kind), ragged(5)
    free, options = ends(target, ids, mask)
    plain = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=24, **options)
    drafter = lab.knowing(texts_of(free, mask), block_size=4)
    ours = play(target, drafter, ids, mask, use_cuda_graphs="auto", max_new_tokens=24, **options)
    assert torch.equal(ours.sequences, plain)
    assert len(made) == first


@pytest.mark.parametrize("kind", ["qwen3.5", slow("mamba2")])
def test_the_cache_that_is_returned_is_the_callers(lab, kind):
    target, drafter, (ids, mask) = lab.target(kind), lab.drafter(), ragged(3)
    first = play(target, drafter, ids, mask)
    assert first.cache.lengths == [len(text) - 1 for text in first.cache.ids]  # the last token has not been read
    play(target, drafter, *ragged(3, seed=5))  # writes over what the first call worked on
    ids, mask = padded(second_turn(first.sequences, mask, (1, 7, 4)))
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 12}
    plain = target.generate(ids, **options)
    assert torch.equal(target.generate(ids, cache=first.cache, assistant_model=drafter, **options), plain)


class Soon(MaxTimeCriteria):
    """Time is up when it is asked for the fifth time, about one row of the second round that is read."""

    def __init__(self):
        self.times = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.times += 1
        return torch.tensor([self.times > 4])


@pytest.mark.parametrize("kind", ["lfm2", slow("qwen3.5")])
def test_states_that_a_round_under_way_moved_on(lab, kind):
    """When time is up, a text has ended for the host, and goes on in the round that is under way."""
    target, (ids, mask) = lab.target(kind), ragged(3)
    free = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=40)
    drafter = lab.knowing(texts_of(free, mask), block_size=4)
    options = {"generation_config": config(max_new_tokens=40), "stopping_criteria": [Soon()]}
    first = target.generate(ids, attention_mask=mask, assistant_model=drafter, **options)
    assert all(len(text) < 40 for text in first.cache.ids)
    second_turn_is_plain(target, drafter, first)


@pytest.mark.parametrize("kind", ["qwen3.5", "lfm2", "nemotron-h", "kimi-linear"])
def test_nothing_is_read_back(lab, kind):
    target, (ids, mask) = lab.target(kind), ragged(3)
    loop = InStaticRounds(7, watch=NothingReadBack())
    target.generate(ids, attention_mask=mask, custom_generate=loop, drafter=lab.drafter(), max_new_tokens=9)
    assert loop.results


@pytest.mark.parametrize("kind", ["falcon-mamba", "zaya", *map(slow, sorted(EAGER - {"falcon-mamba", "zaya"}))])
def test_families_that_stay_eager(lab, kind):
    target, drafter, (ids, mask) = lab.target(kind), lab.drafter(), ragged(2)
    name = type(next(iter(mixers(target).values()))).__name__
    assert missing_windows(target) == f"{name} shows its state behind the last token of a window alone"
    with pytest.raises(NotImplementedError, match=r"cannot be captured \(.*(state|position)"):
        play(target, drafter, ids, mask)
    ours = play(target, drafter, ids, mask, use_cuda_graphs="auto", max_new_tokens=6)
    assert drafter.captured is None
    plain = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=6)
    assert torch.equal(ours.sequences, plain)


def test_a_replaced_forward_is_left_alone(lab):
    target = copy.deepcopy(lab.target("qwen3.5"))
    mixer = mixers(target)[0]
    mixer.forward = lambda *args, **kwargs: type(mixer).forward(mixer, *args, **kwargs)
    with pytest.raises(NotImplementedError, match="forward of a Qwen3_5GatedDeltaNet is not its own"):
        play(target, lab.drafter(), *ragged(2))


def test_calls_of_two_threads_leave_each_other_their_forwards(lab):
    """Whichever ends first. A forward that is only lent does not keep rounds from being captured."""
    target = lab.target("lfm2")
    caches = [RaggedCache(target, lab.drafter(), 2, 9) for _ in range(2)]
    window = VerifyWindow.pack([0], [1], target.device, certain=True)
    for first in (0, 1):
        reading = caches[0].reading(window), caches[1].stepping(window)
        for call in (reading[first], reading[1 - first]):
            call.__enter__()
            assert missing_windows(target) is None
        reading[first].__exit__(None, None, None)
        assert all("forward" in vars(mixer) for mixer in mixers(target).values())
        reading[1 - first].__exit__(None, None, None)
        assert not any("forward" in vars(mixer) for mixer in mixers(target).values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3.5", "mamba2"])
def test_compiled_once(lab, kind, monkeypatch):
    monkeypatch.setattr(ragged_ops, "served", lambda tensor: True)
    monkeypatch.setattr(decoding, "few_rows_linears", lambda *models: nullcontext())  # for a CPU alone
    monkeypatch.setattr(captured, "Graph", WarmedUp)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    target, drafter = copy.deepcopy(lab.target(kind)), lab.drafter()
    compiling = CompileConfig(backend="aot_eager", fullgraph=True)
    for rows, kept in ((4, True), (2, True), (3, True), (4, False)):
        drafter.captured = drafter.captured if kept else None  # other buffers, for which nothing is compiled again
        ids, mask = ragged(rows)
        plain = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=12)
        ours = play(target, drafter, ids, mask, max_new_tokens=12, compile_config=compiling)
        assert torch.equal(ours.sequences, plain)
    built = torch._dynamo.utils.counters["stats"]["unique_graphs"] - len(COMPILED)
    assert 5 <= built <= 6  # the step; the states; three parts of a round, of which other buffers may ask one anew
