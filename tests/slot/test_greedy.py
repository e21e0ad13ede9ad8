"""Greedy decoding with a drafter gives the very tokens of plain generate."""

import threading

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import transformers_dspark


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("block", range(1, 9))
def test_every_block_size(lab, both, prompt, kind, block):
    plain, ours = both(lab.target(kind), prompt, block, max_new_tokens=24)
    assert torch.equal(plain, ours)


@pytest.mark.parametrize("head", ["none", "vanilla", "gated", "rnn"])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_real_drafters(lab, prompt, kind, head):
    target = lab.target(kind)
    rank = {"markov_rank": 0} if head == "none" else {"markov_head_type": head}
    ours = target.generate(prompt, assistant_model=lab.drafter(**rank), max_new_tokens=24, do_sample=False)
    assert torch.equal(target.generate(prompt, max_new_tokens=24, do_sample=False), ours)


def test_many_prompts(lab):
    target, drafter = lab.target(), lab.drafter()
    generator = torch.Generator().manual_seed(0)
    for length in range(1, 26):
        prompt = torch.randint(3, 64, (1, length), generator=generator)
        ours = target.generate(prompt, assistant_model=drafter, max_new_tokens=12, do_sample=False)
        assert torch.equal(target.generate(prompt, max_new_tokens=12, do_sample=False), ours)


@pytest.mark.parametrize("new_tokens", range(1, 10))
def test_every_length(lab, both, prompt, new_tokens):
    plain, ours = both(lab.target(), prompt, 4, max_new_tokens=new_tokens)
    assert ours.shape[1] == prompt.shape[1] + new_tokens
    assert torch.equal(plain, ours)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 12, "eos_token_id": 30},
        {"bad_words_ids": [[7], [12, 13], [50]]},
        {"suppress_tokens": [3, 4, 5, 40]},
        {"begin_suppress_tokens": [3, 4, 5, 40, 44]},
        {"forced_eos_token_id": 30},
        {"sequence_bias": {(9,): 4.0, (11, 12): -3.0}},
        {"exponential_decay_length_penalty": (4, 1.3), "eos_token_id": 30},
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "bad_words_ids": [[7]], "renormalize_logits": True},
        {"prefix_allowed_tokens_fn": lambda row, ids: [t for t in range(64) if t % 3 == len(ids) % 3]},
        {"guidance_scale": 1.5},
    ],
    ids=lambda options: "+".join(options),
)
def test_logits_processors(lab, both, prompt, options):
    plain, ours = both(lab.target(), prompt, 4, return_dict_in_generate=True, output_scores=True, **options)
    assert torch.equal(plain.sequences, ours.sequences)
    torch.testing.assert_close(plain.scores, ours.scores, rtol=1e-4, atol=1e-4)


def test_a_draft_that_is_right_is_accepted(lab, prompt):
    target = lab.target()
    plain = target.generate(prompt, max_new_tokens=21, do_sample=False)
    drafter = lab.scripted(plain, [None], block_size=4)
    out = target.generate(
        prompt, assistant_model=drafter, max_new_tokens=21, do_sample=False, return_dict_in_generate=True
    )
    assert out.dspark.accepted_lengths == [[5, 5, 5, 5]]
    assert out.dspark.acceptance_by_position == [1.0] * 4
    assert out.dspark.rounds == 4
    assert out.dspark.draft_seconds > 0
    assert out.dspark.verify_seconds > 0


def test_acceptance_survives_processors(lab, prompt):
    """The drafter's logits go through the same processors: what they forbid is not proposed."""
    target, options = lab.target(), {"max_new_tokens": 21, "do_sample": False, "repetition_penalty": 1.8}
    plain = target.generate(prompt, **options)
    out = target.generate(prompt, assistant_model=lab.scripted(plain, [None]), return_dict_in_generate=True, **options)
    assert out.dspark.mean_accepted_length > 3


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_left_padded_prompt(lab, both, prompt, kind):
    padded = torch.cat((torch.zeros(1, 3, dtype=torch.long), prompt), dim=1)
    mask = (torch.arange(padded.shape[1]) >= 3).long()[None]
    plain, ours = both(lab.target(kind), padded, 4, attention_mask=mask)
    assert torch.equal(plain, ours)


def test_padding_does_not_reach_the_drafter(lab, prompt):
    target, drafter = lab.target(), lab.drafter()
    padded = torch.cat((torch.zeros(1, 5, dtype=torch.long), prompt), dim=1)
    mask = (torch.arange(padded.shape[1]) >= 5).long()[None]
    options = {"assistant_model": drafter, "max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True}
    alone, behind = target.generate(prompt, **options), target.generate(padded, attention_mask=mask, **options)
    assert torch.equal(alone.sequences, behind.sequences[:, 5:])
    assert alone.dspark.accepted_lengths == behind.dspark.accepted_lengths


def test_padded_vocabulary(lab, prompt):
    """The head has more rows than the vocabulary; none of them is ever proposed."""
    target = lab.target(head_dim=8, hidden_size=32, initializer_range=0.25)
    wider = torch.nn.Linear(32, 96, bias=False)
    with torch.no_grad():
        wider.weight[:64], wider.weight[64:] = target.lm_head.weight, -target.lm_head.weight[:32]
    target.lm_head = wider
    plain = target.generate(prompt, max_new_tokens=16, do_sample=False, suppress_tokens=list(range(64, 96)))
    ours = target.generate(
        prompt,
        assistant_model=lab.scripted(plain),
        max_new_tokens=16,
        do_sample=False,
        suppress_tokens=list(range(64, 96)),
        bad_words_ids=[[70]],
    )
    assert torch.equal(plain, ours)


@pytest.mark.parametrize("taps", [[-1], [2], [-1, 1, 2], [0]])
def test_taps_at_both_ends(lab, prompt, taps):
    """The embedding output and the last layer, which must be read before the final norm."""
    target, drafter = lab.target(), lab.drafter(target_layer_ids=taps)
    seen = []
    extend = drafter.extend_context
    drafter.extend_context = lambda context, taps, positions: (seen.append(taps), extend(context, taps, positions))
    before = _forward_hooks(target)
    ours = target.generate(prompt, assistant_model=drafter, max_new_tokens=12, do_sample=False)
    assert torch.equal(ours, target.generate(prompt, max_new_tokens=12, do_sample=False))
    left = {hook for hook in _forward_hooks(target) - before if hook.__module__.startswith("transformers_dspark")}
    assert not left  # Transformers' own hooks, which collect hidden states, stay

    outputs = target.model(ours[:, :-1], output_hidden_states=True)
    raw = {}
    hook = target.model.layers[-1].register_forward_hook(
        lambda m, a, o: raw.update(last=o if torch.is_tensor(o) else o[0])
    )
    target.model(ours[:, :-1])
    hook.remove()
    expected = torch.cat([raw["last"] if i == 2 else outputs.hidden_states[i + 1] for i in taps], dim=-1)
    got = torch.cat(seen, dim=1)
    torch.testing.assert_close(got, expected[:, : got.shape[1]], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("who", ["guidance", "criterion", "thread"])
def test_the_last_tap_is_of_our_own_forwards(lab, prompt, who):
    """Others run the same model in the meantime: the drafter must not see their hidden states."""

    class Runs(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            target(input_ids[:, :3])
            return torch.tensor([False])

    def beside(module, args, output):
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=target, args=(prompt[:, :3],))
            thread.start()
            thread.join()

    target, taps = lab.target(), []
    options = {"max_new_tokens": 12, "do_sample": False}
    options |= {"guidance_scale": 1.5} if who == "guidance" else {}
    for disturbed in (False, True):
        drafter, seen = lab.drafter(target_layer_ids=[0, 2]), []
        extend = drafter.extend_context
        drafter.extend_context = lambda context, taps, at, do=extend, to=seen: (to.append(taps), do(context, taps, at))
        extra = {"stopping_criteria": StoppingCriteriaList([Runs()])} if disturbed and who == "criterion" else {}
        hook = target.model.norm.register_forward_hook(beside) if disturbed and who == "thread" else None
        ours = target.generate(prompt, assistant_model=drafter, **options, **extra)
        if hook is not None:
            hook.remove()
        taps.append(torch.cat(seen, dim=1))
    assert torch.equal(ours, target.generate(prompt, **options))
    raw = []
    hook = target.model.layers[-1].register_forward_hook(lambda m, a, o: raw.append(o if torch.is_tensor(o) else o[0]))
    target.model(ours[:, :-1])
    hook.remove()
    for seen in taps:
        torch.testing.assert_close(seen[..., 32:], raw[0][:, : seen.shape[1]], rtol=1e-4, atol=1e-4)


def _forward_hooks(target) -> set:
    return {hook for module in target.modules() for hook in module._forward_hooks.values()}


def test_custom_generate_is_the_same_door(lab, both, prompt):
    target, drafter = lab.target(), lab.drafter()
    options = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True}
    slot = target.generate(prompt, assistant_model=drafter, **options)
    door = target.generate(prompt, custom_generate=transformers_dspark.generate, drafter=drafter, **options)
    assert torch.equal(slot.sequences, door.sequences)
    assert slot.dspark.accepted_lengths == door.dspark.accepted_lengths
    assert torch.equal(door.sequences, target.generate(prompt, max_new_tokens=16, do_sample=False))
