"""The committed card says what the results files say."""

import importlib.util
from pathlib import Path


ROOT = Path(__file__).parents[1]


def test_card_is_filled_from_the_results():
    spec = importlib.util.spec_from_file_location("fill", ROOT / "model_cards" / "fill.py")
    fill = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fill)
    committed = (ROOT / "drafters" / fill.NAME / "README.md").read_text()
    assert committed == fill.card(), "run `python model_cards/fill.py`"
