from types import SimpleNamespace

import pytest
from transformers import GenerationConfig

from transformers_dspark import DSparkGenerationConfig
from transformers_dspark.generation_config import DraftingOptions


DRAFTER = SimpleNamespace(config=SimpleNamespace(block_size=5, enable_confidence_head=True))


def completed(config):
    """As `generate` hands it on: Transformers' global defaults filled in."""
    config.update(**GenerationConfig._get_default_generation_params(), defaults_only=True)
    return config


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GenerationConfig(), DraftingOptions(5)),
        (GenerationConfig(num_assistant_tokens=3), DraftingOptions(3)),
        (GenerationConfig(num_assistant_tokens=9), DraftingOptions(5)),
        (GenerationConfig(assistant_confidence_threshold=0.3), DraftingOptions(5, 0.3)),
        (DSparkGenerationConfig(), DraftingOptions(5)),
        (DSparkGenerationConfig(assistant_confidence_threshold=0.4), DraftingOptions(5, 0.4)),
        (DSparkGenerationConfig(max_verify_tokens=2, seed=9), DraftingOptions(2, 0.0, 9)),
        (DSparkGenerationConfig(max_verify_tokens=4, num_assistant_tokens=1), DraftingOptions(1)),
        (DSparkGenerationConfig(max_verify_tokens=0), DraftingOptions(0)),
    ],
)
def test_what_counts_as_given(config, expected):
    assert DraftingOptions.resolve(completed(config), DRAFTER) == expected


def test_options_saved_beside_the_drafter():
    drafter = SimpleNamespace(
        config=DRAFTER.config, generation_config=DSparkGenerationConfig(max_verify_tokens=3, seed=1)
    )
    assert DraftingOptions.resolve(completed(GenerationConfig()), drafter) == DraftingOptions(3, 0.0, 1)
    ours = completed(DSparkGenerationConfig(max_verify_tokens=2))
    assert DraftingOptions.resolve(ours, drafter) == DraftingOptions(2, 0.0, 1)


def test_save_and_load(tmp_path):
    config = DSparkGenerationConfig(max_verify_tokens=3, seed=7, assistant_confidence_threshold=0.25, max_new_tokens=9)
    config.save_pretrained(tmp_path)
    assert DSparkGenerationConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()
    assert GenerationConfig.from_pretrained(tmp_path).max_new_tokens == 9


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dspark_loop": "batch"}, ValueError),
        ({"dspark_loop": "batched"}, NotImplementedError),
        ({"max_verify_tokens": -1}, ValueError),
        ({"assistant_confidence_threshold": 2}, ValueError),
    ],
)
def test_out_of_range(options, error):
    with pytest.raises(error, match=next(iter(options))):
        DSparkGenerationConfig(**options)
