import json

from transformers_dspark import GenerationStats


def test_rounds():
    stats = GenerationStats()
    stats.record_round([3, 2], [3, 0], [4, 1])
    stats.record_round([3, 0], [1, 0], [2, 1])
    stats.record_round([3, 2], [2, 0], [2, 0])  # the first row ended with its second draft; the second had finished
    assert stats.rounds == 3
    assert stats.accepted_lengths == [[4, 2, 2], [1, 1]]
    assert stats.verify_lengths == [[3, 3, 3], [2, 0]]
    assert stats.mean_accepted_length == 2.0
    # position 1: four tests, three passed; position 2: three and two; position 3: one and one
    assert stats.acceptance_by_position == [3 / 4, 2 / 3, 1.0]
    assert json.loads(json.dumps(stats.to_dict()))["acceptance_by_position"] == [3 / 4, 2 / 3, 1.0]


def test_positions_without_a_test():
    stats = GenerationStats()
    stats.record_round([3], [0], [1])
    assert stats.acceptance_by_position == [0.0, None, None]


def test_nothing_happened():
    assert GenerationStats().mean_accepted_length == 0.0
    assert GenerationStats().to_dict()["rounds"] == 0
