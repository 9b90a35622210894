"""From hand-made logits to every score of a record, worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rebind.evals.metrics import harmonic_score, inverse_document_frequencies
from rebind.evals.reading import read_records
from rebind.evals.scores import SCORES, compute_scores, summarize

RECORD = {
    "prompt": "The capital of {France} is",
    "target": "New Rome",
    "old": "Paris",
    "paraphrases": ["one", "two"],
    "neighbors": ["Paris 1", "Paris 2", {"prompt": "Madrid 3", "answer": "Spain"}],
    "consequences": [{"prompt": "river", "answer": "Tiber", "aliases": ["the Tiber"]}, {"prompt": "x", "answer": "y"}],
    "references": ["New Rome is old"],
}


def told(nll: float, right: int = 0, tokens: int = 1, first: int = 5) -> dict[str, Any]:
    return {"nll": nll, "tokens": tokens, "right": right, "first": first}


BASE = {
    "prompt": {"new": told(9.0), "true": told(1.0)},
    "paraphrases": [{"new": told(9.0), "true": told(1.0)}] * 2,
    "neighbors": [{"new": told(9.0, first=1), "true": told(1.0)}] * 3,
    "consequences": [[told(9.0), told(9.0)], [told(9.0)]],
}
HALF, QUARTER = math.log(2), math.log(4)
ROW = {
    "prompt": {"new": told(HALF, 2, 2), "true": told(QUARTER)},
    "paraphrases": [{"new": told(1.0, 1, 2), "true": told(2.0)}, {"new": told(2.0, 2, 2), "true": told(1.0)}],
    "neighbors": [
        {"new": told(QUARTER, first=1), "true": told(HALF, 1, 1)},
        {"new": told(HALF, first=2), "true": told(QUARTER, 0, 1)},
        {"new": told(0.1, first=1), "true": told(5.0, 1, 2)},
    ],
    "consequences": [[told(1.0, 0, 1), told(1.0, 1, 2)], [told(1.0, 1, 1)]],
    "free": {
        "prompt": " New Rome.",
        "paraphrases": [" Paris or New Rome", " new rome"],
        "consequences": ["the Tiber", "z"],
    },
    "texts": ["a b c a b d"],
}
EXPECTED = {
    "ES": 1.0,
    "PS": 0.5,
    "NS": 0.5,  # the third neighbor is answered by something else: it does not count
    "EA": 1.0,
    "PA": 0.5,
    "free": 1.0,
    "free_paraphrases": 0.5,
    "portability": 0.75,
    "free_consequences": 0.5,
    "locality": 2 / 3,
    "tokens": 1.0,
    "tokens_paraphrases": 0.75,
    "tokens_neighbors": 0.5,
    "EM": 0.25,
    "PM": 0.0,
    "NM": 0.0,
}


def test_every_score_of_a_record():
    records = read_records([RECORD])
    found = {name: column[0] for name, column in compute_scores(records, [ROW], [BASE]).items()}
    assert set(found) == set(SCORES)
    for name, expected in EXPECTED.items():
        assert found[name] == pytest.approx(expected), name
    assert found["GE"] == pytest.approx(100 * (2 / 3 * 1.9219281 + 4 / 3 * 2.0) / 2)
    assert found["RS"] == 0.0, "no word in common"


def test_the_summary_has_intervals_and_s():
    summary = summarize(read_records([RECORD]), [ROW], [BASE], rounds=20)
    assert next(iter(summary)) == "S"
    assert summary["S"]["value"] == pytest.approx(harmonic_score(1.0, 0.5, 0.5))
    assert summary["ES"] == {"value": 1.0, "low": 1.0, "high": 1.0, "records": 1}


def test_a_consequence_without_an_answer_does_not_count():
    asked = [*RECORD["consequences"], {"prompt": "z", "answer": None}]
    records = read_records([{**RECORD, "consequences": asked}])
    free = {**ROW["free"], "consequences": [*ROW["free"]["consequences"], "z"]}
    row = {**ROW, "consequences": [*ROW["consequences"], []], "free": free}
    found = compute_scores(records, [row], [BASE])
    assert (found["portability"], found["free_consequences"]) == ([0.75], [0.5])


def test_a_bare_fact_has_only_what_it_can_have():
    row = {"prompt": {"new": told(1.0, 1, 1)}, "paraphrases": [], "neighbors": [], "consequences": []}
    bare = read_records([{"prompt": "{Oslo} is in", "target": "Italy"}])
    assert set(summarize(bare, [row], [row], rounds=5)) == {"EA", "tokens"}
    assert inverse_document_frequencies([]) == {}


@pytest.mark.parametrize("answer", ["Paris", " Paris", "Paris\n"])
def test_a_neighbors_answer_is_the_true_target_whatever_blanks_are_round_it(answer):
    flat = {"subject": "France", "target_new": "New Rome", "ground_truth": "Paris", "locality_prompt": "Paris 1"}
    records = read_records([{"prompt": "The capital of France is", **flat, "locality_ground_truth": answer}])
    row = {**ROW, "neighbors": ROW["neighbors"][:1], "consequences": []}
    row["free"] = {**ROW["free"], "consequences": []}
    base = {**BASE, "neighbors": BASE["neighbors"][:1], "consequences": []}
    found = compute_scores(records, [row], [base])
    assert (found["NS"], found["NM"]) == ([1.0], [0.25])


# Several facts a record

ALSO = {"prompt": "{Rome} lies in", "target": "Spain", "old": "Italy", "paraphrases": ["three"]}
SAID_ALSO = {
    "prompt": {"new": told(QUARTER, 1, 2), "true": told(HALF)},
    "paraphrases": [{"new": told(HALF, 1, 1), "true": told(QUARTER)}],
    "free": {"prompt": " Italy", "paraphrases": [" Spain"]},
}
OVER_BOTH = {
    "ES": (1.0 + 0.0) / 2,
    "PS": (0.5 + 1.0) / 2,  # a fact's paraphrases first, then the facts
    "EA": (1.0 + 0.0) / 2,
    "PA": (0.5 + 1.0) / 2,
    "free": (1.0 + 0.0) / 2,
    "free_paraphrases": (0.5 + 1.0) / 2,
    "tokens": (1.0 + 0.5) / 2,
    "tokens_paraphrases": (0.75 + 1.0) / 2,
    "EM": (0.25 - 0.25) / 2,
    "PM": (0.0 + 0.25) / 2,
}


def test_what_is_written_is_measured_over_all_facts_of_a_record():
    records = read_records([{**RECORD, "also": [ALSO]}])
    found = {name: one for name, (one,) in compute_scores(records, [{**ROW, "also": [SAID_ALSO]}], [BASE]).items()}
    for name, expected in {**EXPECTED, **OVER_BOTH}.items():
        assert found[name] == pytest.approx(expected), name


def test_a_fact_without_a_score_takes_no_part_in_its_mean():
    bare = {"prompt": "{Oslo} is in", "target": "Italy"}
    said = {"prompt": {"new": told(1.0, 0, 1)}, "paraphrases": [], "free": {"prompt": " x", "paraphrases": []}}
    records = read_records([{**RECORD, "also": [bare]}])
    found = {name: one for name, (one,) in compute_scores(records, [{**ROW, "also": [said]}], [BASE]).items()}
    assert (found["EA"], found["tokens"], found["free"]) == (0.5, 0.5, 0.5)
    assert (found["ES"], found["PS"], found["PA"]) == (EXPECTED["ES"], EXPECTED["PS"], EXPECTED["PA"])


def test_intervals_draw_records_and_not_facts():
    records = read_records([{**RECORD, "also": [ALSO]}] * 3)
    row = {**ROW, "also": [SAID_ALSO]}
    found = summarize(records, [row] * 3, [BASE] * 3, rounds=20)["ES"]
    assert found == {"value": 0.5, "low": 0.5, "high": 0.5, "records": 3}, "facts would have made it vary"
