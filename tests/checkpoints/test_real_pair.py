"""
The real pair after each export: `pytest -m slow tests/checkpoints/test_real_pair.py -s` fetches the target once (93
MB), then takes two minutes. `dspark eval FILE --drafter FOLDER` gives the same figures for any folder and prompts.
"""

import json
from pathlib import Path

import pytest

from transformers_dspark import cli
from transformers_dspark.checkpoints.forms import FORMS
from transformers_dspark.evaluation.prompts import DEMO_PROMPTS
from transformers_dspark.evaluation.real_pair import fetch_target, find_drafter


@pytest.mark.slow
def test_accepted_length_is_the_same_in_every_form(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [DEMO_PROMPTS[kind]]}) + "\n" for kind in ("code", "chat")))

    def measured(drafter: str) -> dict:
        file = tmp_path / "result.json"
        words = ["eval", str(prompts), "--drafter", drafter, "--max-new-tokens", "48", "--device", "cpu"]
        assert cli.main([*words, "--json", str(file)]) == 0
        (result,) = json.loads(file.read_text())["results"]
        return {name: result[name] for name in ("tokens", "rounds", "accepted_length", "acceptance_by_position")}

    source = find_drafter()
    original, found = measured(source), {}
    for form, more in [(form, []) for form in (*FORMS, "canonical")] + [("speculators", ["--target"])]:
        folder = str(tmp_path / f"{form}{len(more)}")
        options = [*more, str(fetch_target())] if more else []
        assert cli.main(["export", source, folder, "--to", form, *options]) == 0
        found[form, *more] = measured(folder)
    print(f"\naccepted length {original['accepted_length']:.3f} over {original['rounds']} rounds, and in", *found)
    assert original["accepted_length"] > 2
    assert all(result == original for result in found.values())
