"""Each metric on numbers that can be worked out by hand."""

from __future__ import annotations

import math

import pytest

from rebind.evals import metrics
from rebind.evals.metrics import bootstrap


def test_new_against_true():
    pairs = [(1.0, 2.0), (2.0, 1.0), (1.0, 1.0), (0.5, 3.0)]  # (new, true)
    assert metrics.efficacy_score(pairs) == 0.5, "a tie is no success"
    assert metrics.neighborhood_score(pairs) == 0.25, "nor is it one the other way"


def test_accuracies():
    counts = [(3, 3), (2, 3), (0, 1), (1, 1)]  # (right, tokens)
    assert metrics.accuracy(counts) == 0.5
    assert metrics.portability([[(0, 2), (1, 2)], [(1, 1)]]) == pytest.approx(0.75), "the best wording counts"


def test_entropy_in_bits():
    words = ["a", "b", "c", "a", "b", "d"]  # ab ×2, bc, ca, bd: entropy of (2, 1, 1, 1)/5
    expected = -(0.4 * math.log2(0.4) + 3 * 0.2 * math.log2(0.2))
    assert metrics.ngram_entropy(words, 2) == pytest.approx(expected)
    assert metrics.ngram_entropy(words, 3) == pytest.approx(2.0)  # abc bca cab abd
    assert metrics.ngram_entropy(["a"], 2) == 0.0


def test_fluency_weighs_two_and_three_grams():
    text = "a b c a b d"
    two, three = (metrics.ngram_entropy(text.split(), n) for n in (2, 3))
    assert metrics.fluency([text]) == pytest.approx(100 * (2 / 3 * two + 4 / 3 * three) / 2)
    assert metrics.fluency(["x x x x x x"]) == 0.0
    assert metrics.fluency([text, "x x x x"]) == pytest.approx(metrics.fluency([text]) / 2)


def test_consistency_is_the_cosine_of_weighted_words():
    idf = metrics.inverse_document_frequencies(["rome is old", "paris is new"])
    assert idf["is"] == pytest.approx(1.0)
    assert idf["rome"] == pytest.approx(math.log(3 / 2) + 1)
    rare = idf["rome"]
    # text (is, rome), reference (is, paris): only "is" is common
    assert metrics.consistency("is rome", "is paris", idf) == pytest.approx(1 / (1 + rare**2))
    assert metrics.consistency("Rome IS", "is rome", idf) == pytest.approx(1.0)
    assert metrics.consistency("rome", "paris", idf) == 0.0
    assert metrics.consistency("", "paris", idf) == 0.0
    assert metrics.consistency("unheard rome", "rome", idf) == pytest.approx(1 / math.sqrt(2)), "as rare as the rarest"


def test_perplexity_is_eight_for_three_bits_a_token():
    assert metrics.perplexity(10 * 3 * math.log(2), 10) == pytest.approx(8.0)
    assert metrics.perplexity(1e6, 10) == math.inf


# Intervals


def test_the_bootstrap_is_seeded_and_holds_the_mean():
    values = [float(index % 3 == 0) for index in range(60)]
    first, again = (bootstrap({"x": values}, seed=3)["x"] for _ in range(2))
    assert first == again
    assert len({bootstrap({"x": values}, seed=seed, rounds=30)["x"]["low"] for seed in range(5)}) > 1
    assert first["value"] == pytest.approx(1 / 3)
    assert first["low"] < first["value"] < first["high"]
    # the normal approximation, 1.96·√(p(1−p)/n), to a fifth
    assert (first["high"] - first["low"]) / 2 == pytest.approx(1.96 * math.sqrt(2 / 9 / 60), rel=0.2)


def test_constant_values_have_no_width():
    assert bootstrap({"x": [0.5] * 7})["x"] == {"value": 0.5, "low": 0.5, "high": 0.5, "records": 7}


def test_what_a_record_does_not_have_is_left_out():
    estimates = bootstrap({"some": [1.0, None, 0.0, None], "none": [None] * 4})
    assert set(estimates) == {"some"}
    assert (estimates["some"]["value"], estimates["some"]["records"]) == (0.5, 2)
    assert bootstrap({"none": [None]}) == {}


def test_s_is_the_harmonic_mean_of_means():
    columns = {"ES": [1.0, 1.0, None], "PS": [1.0, 0.0, None], "NS": [0.0, 0.5, 0.25]}
    score = bootstrap(columns, rounds=200)["S"]
    assert score["value"] == pytest.approx(3 / (1 + 2 + 4))
    assert score["low"] == 0.0, "a sample of one record alone has a zero in it"
    assert score["records"] == 2
    assert "S" not in bootstrap({"ES": [1.0], "PS": [None], "NS": [1.0]})
    framed = bootstrap({**columns, "ES_chat": [1.0, 1.0, 1.0], "PS_chat": [0.5, 0.5, 0.5], "NS_chat": [1.0, 1.0, 1.0]})
    assert framed["S_chat"]["value"] == pytest.approx(0.75)
