"""From hand-made answers to every score of a record, worked out by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from rebind.evals import read_records
from rebind.evals.metrics import inverse_document_frequencies
from rebind.evals.records import with_rivals
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


def answer(nll: float, right: int = 0, tokens: int = 1) -> dict[str, Any]:
    return {"nll": nll, "tokens": tokens, "right": right}


START = {
    "prompt": {"new": answer(1.0, 2, 2), "true": answer(2.0)},
    "paraphrases": [{"new": answer(1.0, 1, 2), "true": answer(2.0)}, {"new": answer(2.0, 2, 2), "true": answer(1.0)}],
    "free": " New Rome.",
    "free_paraphrases": [" Paris or New Rome", " new rome"],
}
CHAT = {
    "prompt": {"new": answer(2.0, 1, 2), "true": answer(2.0)},
    "paraphrases": [{"new": answer(1.0, 2, 2), "true": answer(2.0)}] * 2,
    "free": "The capital of Italy is New Rome.",
}
NEIGHBORS = [
    {"new": answer(2.0), "true": answer(1.0)},
    {"new": answer(1.0), "true": answer(2.0)},
    {"new": answer(0.1), "true": answer(5.0)},
]
ROW: dict[str, Any] = {
    "facts": [{"start": START, "chat": CHAT}],
    "neighbors": {"start": NEIGHBORS, "chat": NEIGHBORS[:1] * 3},
    "choice": [answer(1.0), answer(2.0), answer(1.5)],
    "consequences": [[answer(1.0, 0, 1), answer(1.0, 1, 2)], [answer(1.0, 1, 1)]],
    "free_consequences": ["the Tiber", "z"],
    "free_reversed": [" the kingdom of France"],
    "kept": {
        "neighbors": [{"same": True, "kl": 0.1}, {"same": True, "kl": 0.2}, {"same": False, "kl": 0.6}],
        "same_subject": [{"same": True, "kl": 0.0}, {"same": False, "kl": 1.0}],
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
    "ES_chat": 0.0,
    "PS_chat": 1.0,
    "NS_chat": 1.0,
    "EA_chat": 0.0,
    "PA_chat": 1.0,
    "free_chat": 0.0,  # said of another subject
    "EA_plain": None,
    "free_paraphrases": 0.5,
    "choice": 1.0,
    "portability": 0.75,
    "free_consequences": 0.5,
    "free_reversed": 1.0,
    "locality": 2 / 3,
    "locality_kl": 0.3,
    "same_subject": 0.5,
    "same_subject_kl": 0.5,
}


def score(record: dict[str, Any], row: dict[str, Any] = ROW) -> Scores:
    return score_record(read_records([record])[0], row)


def test_every_score_of_a_record():
    scores = score(RECORD)
    assert {*scores, *(name for name in SCORES if name.startswith("S"))} == set(SCORES)
    for name, expected in EXPECTED.items():
        assert scores[name] == (None if expected is None else pytest.approx(expected)), name
    assert scores["GE"] == pytest.approx(100 * (2 / 3 * 1.9219281 + 4 / 3 * 2.0) / 2)
    assert scores["RS"] == 0.0, "no word in common"


def test_the_summary_has_intervals_and_s_in_every_framing():
    summary = summarize(read_records([RECORD]), [ROW], rounds=20)
    assert summary["S"]["value"] == pytest.approx(3 / (1 + 2 + 2), abs=1e-6)
    assert summary["S_chat"]["value"] == 0.0
    assert not [name for name in summary if name.endswith(("_plain", "_text"))]
    assert summary["ES"] == {"value": 1.0, "low": 1.0, "high": 1.0, "records": 1}


def test_a_consequence_without_an_answer_does_not_count():
    asked = [*RECORD["consequences"], {"prompt": "z", "answer": None}]
    row = {**ROW, "consequences": [*ROW["consequences"], []], "free_consequences": [*ROW["free_consequences"], "z"]}
    scores = score({**RECORD, "consequences": asked}, row)
    assert (scores["portability"], scores["free_consequences"]) == (0.75, 0.5)


def test_a_bare_fact_has_only_what_it_can_have():
    fact = {"start": {"prompt": {"new": answer(1.0, 1, 1)}, "paraphrases": []}}
    row = {"facts": [fact], "neighbors": {"start": []}, "choice": [answer(1.0)], "consequences": []}
    bare = read_records([{"prompt": "{Oslo} is in", "target": "Italy"}])
    assert set(summarize(bare, [row], rounds=5)) == {"EA"}
    assert inverse_document_frequencies([]) == {}


@pytest.mark.parametrize("answer", ["Paris", " Paris", "Paris\n"])
def test_a_neighbors_answer_is_the_true_target_whatever_blanks_are_round_it(answer):
    flat = {"subject": "France", "target_new": "New Rome", "ground_truth": "Paris", "locality_prompt": "Paris 1"}
    record = {"prompt": "The capital of France is", **flat, "locality_ground_truth": answer}
    assert score(record, {**ROW, "neighbors": {"start": NEIGHBORS[:1]}, "consequences": []})["NS"] == 1.0


def test_a_forced_choice_wants_the_new_target_before_all_others():
    for others, expected in (([2.0, 3.0], 1.0), ([1.0, 3.0], 0.0), ([2.0, 0.5], 0.0), ([], None)):
        row = {**ROW, "choice": [answer(1.0), *map(answer, others)]}
        assert score(RECORD, row)["choice"] == expected


def test_rivals_are_answers_of_other_records_of_the_relation():
    raw = [
        {"prompt": "The capital of {} is", "subject": subject, "target": "Oslo", "old": old}
        for subject, old in (("France", "Paris"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Japan", "Tokyo"))
    ]
    other = {"prompt": "The money of {France} is the", "target": "peso", "old": "franc", "tags": ["money", "set/1"]}
    tagged = {"prompt": "In {India} people pay by the", "target": "euro", "old": "rupee", "tags": ["money", "set/1"]}
    rivals = [record.rivals for record in with_rivals(read_records([*raw, raw[0], other, tagged]))]
    assert rivals[0] == rivals[4] == ("Rome", "Madrid", "Tokyo")
    assert rivals[1] == ("Paris", "Madrid", "Tokyo")
    assert rivals[5:] == [("rupee",), ("franc",)], "the same tag, unless it names a case"


# Several facts per record

ALSO = {"prompt": "{Rome} lies in", "target": "Spain", "old": "Italy", "paraphrases": ["three"]}
ALSO_ROW = {
    "start": {
        "prompt": {"new": answer(2.0, 1, 2), "true": answer(1.0)},
        "paraphrases": [{"new": answer(1.0, 1, 1), "true": answer(2.0)}],
        "free": " Italy",
        "free_paraphrases": [" Spain"],
    },
    "chat": CHAT,
}
OVER_BOTH = {
    "ES": (1.0 + 0.0) / 2,
    "PS": (0.5 + 1.0) / 2,  # a fact's paraphrases first, then the facts
    "EA": (1.0 + 0.0) / 2,
    "PA": (0.5 + 1.0) / 2,
    "free": (1.0 + 0.0) / 2,
    "free_paraphrases": (0.5 + 1.0) / 2,
}


def with_other(row: dict[str, Any]) -> dict[str, Any]:
    return {**copy.deepcopy(ROW), "facts": [*ROW["facts"], row]}


def test_what_is_written_is_measured_over_all_facts_of_a_record():
    scores = score({**RECORD, "also": [ALSO]}, with_other(ALSO_ROW))
    for name, expected in {**EXPECTED, **OVER_BOTH}.items():
        assert scores[name] == (None if expected is None else pytest.approx(expected)), name


def test_a_fact_without_a_score_takes_no_part_in_its_mean():
    bare = {"prompt": "{Oslo} is in", "target": "Italy"}
    part = {"prompt": {"new": answer(1.0, 0, 1)}, "paraphrases": [], "free": " x"}
    scores = score({**RECORD, "also": [bare]}, with_other({"start": part, "chat": part}))
    assert (scores["EA"], scores["free"]) == (0.5, 0.5)
    assert (scores["ES"], scores["PS"], scores["PA"]) == (EXPECTED["ES"], EXPECTED["PS"], EXPECTED["PA"])


def test_intervals_draw_records_and_not_facts():
    records = read_records([{**RECORD, "also": [ALSO]}] * 3)
    scores = summarize(records, [with_other(ALSO_ROW)] * 3, rounds=20)["ES"]
    assert scores == {"value": 0.5, "low": 0.5, "high": 0.5, "records": 3}, "facts would have made it vary"
