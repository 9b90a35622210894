"""From hand-made logits to every score of a record, worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rebind.evals import read_records
from rebind.evals.metrics import inverse_document_frequencies
from rebind.evals.scores import SCORES, Scores, score_record, summarize

RECORD = {
    "prompt": "The capital of {France} is",
    "target": "New Rome",
    "old": "Paris",
    "paraphrases": ["one", "two"],
    "neighbors": ["Paris 1", "Paris 2", {"prompt": "Madrid 3", "answer": "Spain"}],
    "consequences": [{"prompt": "river", "answer": "Tiber", "aliases": ["the Tiber"]}, {"prompt": "x", "answer": "y"}],
    "references": ["New Rome is old"],
}


def answer(nll: float, right: int = 0, tokens: int = 1, first: int = 5) -> dict[str, Any]:
    return {"nll": nll, "tokens": tokens, "right": right, "first": first}


BASE = {
    "prompt": {"new": answer(9.0), "true": answer(1.0)},
    "paraphrases": [{"new": answer(9.0), "true": answer(1.0)}] * 2,
    "neighbors": [{"new": answer(9.0, first=1), "true": answer(1.0)}] * 3,
    "consequences": [[answer(9.0), answer(9.0)], [answer(9.0)]],
}
HALF, QUARTER = math.log(2), math.log(4)
ROW = {
    "prompt": {"new": answer(HALF, 2, 2), "true": answer(QUARTER)},
    "paraphrases": [{"new": answer(1.0, 1, 2), "true": answer(2.0)}, {"new": answer(2.0, 2, 2), "true": answer(1.0)}],
    "neighbors": [
        {"new": answer(QUARTER, first=1), "true": answer(HALF, 1, 1)},
        {"new": answer(HALF, first=2), "true": answer(QUARTER, 0, 1)},
        {"new": answer(0.1, first=1), "true": answer(5.0, 1, 2)},
    ],
    "consequences": [[answer(1.0, 0, 1), answer(1.0, 1, 2)], [answer(1.0, 1, 1)]],
    "free": {
        "prompt": " New Rome.",
        "paraphrases": [" Paris or New Rome", " new rome"],
        "consequences": ["the Tiber", "z"],
    },
    "texts": ["a b c a b d"],
}


def score(record: dict[str, Any], row: dict[str, Any] = ROW, base: dict[str, Any] = BASE) -> Scores:
    return score_record(read_records([record])[0], row, base)


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
    scores = score(RECORD)
    assert {"S", *scores} == set(SCORES)
    for name, expected in EXPECTED.items():
        assert scores[name] == pytest.approx(expected), name
    assert scores["GE"] == pytest.approx(100 * (2 / 3 * 1.9219281 + 4 / 3 * 2.0) / 2)
    assert scores["RS"] == 0.0, "no word in common"


def test_the_summary_has_intervals_and_s():
    summary = summarize(read_records([RECORD]), [ROW], [BASE], rounds=20)
    assert next(iter(summary)) == "S"
    assert summary["S"]["value"] == pytest.approx(3 / (1 + 2 + 2))
    assert summary["ES"] == {"value": 1.0, "low": 1.0, "high": 1.0, "records": 1}


def test_a_consequence_without_an_answer_does_not_count():
    asked = [*RECORD["consequences"], {"prompt": "z", "answer": None}]
    free = {**ROW["free"], "consequences": [*ROW["free"]["consequences"], "z"]}
    row = {**ROW, "consequences": [*ROW["consequences"], []], "free": free}
    scores = score({**RECORD, "consequences": asked}, row)
    assert (scores["portability"], scores["free_consequences"]) == (0.75, 0.5)


def test_a_bare_fact_has_only_what_it_can_have():
    row = {"prompt": {"new": answer(1.0, 1, 1)}, "paraphrases": [], "neighbors": [], "consequences": []}
    bare = read_records([{"prompt": "{Oslo} is in", "target": "Italy"}])
    assert set(summarize(bare, [row], [row], rounds=5)) == {"EA", "tokens"}
    assert inverse_document_frequencies([]) == {}


@pytest.mark.parametrize("answer", ["Paris", " Paris", "Paris\n"])
def test_a_neighbors_answer_is_the_true_target_whatever_blanks_are_round_it(answer):
    flat = {"subject": "France", "target_new": "New Rome", "ground_truth": "Paris", "locality_prompt": "Paris 1"}
    record = {"prompt": "The capital of France is", **flat, "locality_ground_truth": answer}
    row = {**ROW, "neighbors": ROW["neighbors"][:1], "consequences": []}
    row["free"] = {**ROW["free"], "consequences": []}
    base = {**BASE, "neighbors": BASE["neighbors"][:1], "consequences": []}
    scores = score(record, row, base)
    assert (scores["NS"], scores["NM"]) == (1.0, 0.25)


# Several facts per record

ALSO = {"prompt": "{Rome} lies in", "target": "Spain", "old": "Italy", "paraphrases": ["three"]}
ALSO_ROW = {
    "prompt": {"new": answer(QUARTER, 1, 2), "true": answer(HALF)},
    "paraphrases": [{"new": answer(HALF, 1, 1), "true": answer(QUARTER)}],
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
    scores = score({**RECORD, "also": [ALSO]}, {**ROW, "also": [ALSO_ROW]})
    for name, expected in {**EXPECTED, **OVER_BOTH}.items():
        assert scores[name] == pytest.approx(expected), name


def test_a_fact_without_a_score_takes_no_part_in_its_mean():
    bare = {"prompt": "{Oslo} is in", "target": "Italy"}
    row = {"prompt": {"new": answer(1.0, 0, 1)}, "paraphrases": [], "free": {"prompt": " x", "paraphrases": []}}
    scores = score({**RECORD, "also": [bare]}, {**ROW, "also": [row]})
    assert (scores["EA"], scores["tokens"], scores["free"]) == (0.5, 0.5, 0.5)
    assert (scores["ES"], scores["PS"], scores["PA"]) == (EXPECTED["ES"], EXPECTED["PS"], EXPECTED["PA"])


def test_intervals_draw_records_and_not_facts():
    records = read_records([{**RECORD, "also": [ALSO]}] * 3)
    row = {**ROW, "also": [ALSO_ROW]}
    scores = summarize(records, [row] * 3, [BASE] * 3, rounds=20)["ES"]
    assert scores == {"value": 0.5, "low": 0.5, "high": 0.5, "records": 3}, "facts would have made it vary"
