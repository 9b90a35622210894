"""From hand-made logits to every score of a record, worked out by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rebind.evals.asking import _ask_some, _Asked, _told
from rebind.evals.metrics import harmonic_score, inverse_document_frequencies
from rebind.evals.records import read_records
from rebind.evals.scores import SCORES, scores_of, summarise

RECORD = {
    "prompt": "The capital of {France} is",
    "target": "New Rome",
    "old": "Paris",
    "paraphrases": ["one", "two"],
    "neighbours": ["Paris 1", "Paris 2", {"prompt": "Madrid 3", "answer": "Spain"}],
    "consequences": [{"prompt": "river", "answer": "Tiber", "aliases": ["the Tiber"]}, {"prompt": "x", "answer": "y"}],
    "references": ["New Rome is old"],
}


def told(nll: float, right: int = 0, tokens: int = 1, first: int = 5) -> dict[str, Any]:
    return {"nll": nll, "tokens": tokens, "right": right, "first": first}


BASE = {
    "prompt": {"new": told(9.0), "true": told(1.0)},
    "paraphrases": [{"new": told(9.0), "true": told(1.0)}] * 2,
    "neighbours": [{"new": told(9.0, first=1), "true": told(1.0)}] * 3,
    "consequences": [[told(9.0), told(9.0)], [told(9.0)]],
}
HALF, QUARTER = math.log(2), math.log(4)
ROW = {
    "prompt": {"new": told(HALF, 2, 2), "true": told(QUARTER)},
    "paraphrases": [{"new": told(1.0, 1, 2), "true": told(2.0)}, {"new": told(2.0, 2, 2), "true": told(1.0)}],
    "neighbours": [
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
    "NS": 0.5,  # the third neighbour is answered by something else: it does not count
    "EA": 1.0,
    "PA": 0.5,
    "free": 1.0,
    "free_paraphrases": 0.5,
    "portability": 0.75,
    "free_consequences": 0.5,
    "kept": 2 / 3,
    "tokens": 1.0,
    "tokens_paraphrases": 0.75,
    "tokens_neighbours": 0.5,
    "EM": 0.25,
    "PM": 0.0,
    "NM": 0.0,
}


def test_every_score_of_a_record():
    records = read_records([RECORD])
    found = {name: column[0] for name, column in scores_of(records, [ROW], [BASE]).items()}
    assert set(found) == set(SCORES)
    for name, expected in EXPECTED.items():
        assert found[name] == pytest.approx(expected), name
    assert found["GE"] == pytest.approx(100 * (2 / 3 * 1.9219281 + 4 / 3 * 2.0) / 2)
    assert found["RS"] == 0.0, "no word in common"


def test_the_summary_has_intervals_and_s():
    summary = summarise(read_records([RECORD]), [ROW], [BASE], rounds=20)
    assert next(iter(summary)) == "S"
    assert summary["S"]["value"] == pytest.approx(harmonic_score(1.0, 0.5, 0.5))
    assert summary["ES"] == {"value": 1.0, "low": 1.0, "high": 1.0, "records": 1}


def test_a_consequence_without_an_answer_does_not_count():
    asked = [*RECORD["consequences"], {"prompt": "z", "answer": None}]
    records = read_records([{**RECORD, "consequences": asked}])
    free = {**ROW["free"], "consequences": [*ROW["free"]["consequences"], "z"]}
    row = {**ROW, "consequences": [*ROW["consequences"], []], "free": free}
    found = scores_of(records, [row], [BASE])
    assert (found["portability"], found["free_consequences"]) == ([0.75], [0.5])


def test_a_bare_fact_has_only_what_it_can_have():
    row = {"prompt": {"new": told(1.0, 1, 1)}, "paraphrases": [], "neighbours": [], "consequences": []}
    bare = read_records([{"prompt": "{Oslo} is in", "target": "Italy"}])
    assert set(summarise(bare, [row], [row], rounds=5)) == {"EA", "tokens"}
    assert inverse_document_frequencies([]) == {}


@pytest.mark.parametrize("answer", ["Paris", " Paris", "Paris\n"])
def test_a_neighbours_answer_is_the_true_target_whatever_blanks_are_round_it(answer):
    flat = {"subject": "France", "target_new": "New Rome", "ground_truth": "Paris", "locality_prompt": "Paris 1"}
    records = read_records([{"prompt": "The capital of France is", **flat, "locality_ground_truth": answer}])
    row = {**ROW, "neighbours": ROW["neighbours"][:1], "consequences": []}
    row["free"] = {**ROW["free"], "consequences": []}
    base = {**BASE, "neighbours": BASE["neighbours"][:1], "consequences": []}
    found = scores_of(records, [row], [base])
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
    found = {name: one for name, (one,) in scores_of(records, [{**ROW, "also": [SAID_ALSO]}], [BASE]).items()}
    for name, expected in {**EXPECTED, **OVER_BOTH}.items():
        assert found[name] == pytest.approx(expected), name


def test_a_fact_without_a_score_takes_no_part_in_its_mean():
    bare = {"prompt": "{Oslo} is in", "target": "Italy"}
    said = {"prompt": {"new": told(1.0, 0, 1)}, "paraphrases": [], "free": {"prompt": " x", "paraphrases": []}}
    records = read_records([{**RECORD, "also": [bare]}])
    found = {name: one for name, (one,) in scores_of(records, [{**ROW, "also": [said]}], [BASE]).items()}
    assert (found["EA"], found["tokens"], found["free"]) == (0.5, 0.5, 0.5)
    assert (found["ES"], found["PS"], found["PA"]) == (EXPECTED["ES"], EXPECTED["PS"], EXPECTED["PA"])


def test_intervals_draw_records_and_not_facts():
    records = read_records([{**RECORD, "also": [ALSO]}] * 3)
    row = {**ROW, "also": [SAID_ALSO]}
    found = summarise(records, [row] * 3, [BASE] * 3, rounds=20)["ES"]
    assert found == {"value": 0.5, "low": 0.5, "high": 0.5, "records": 3}, "facts would have made it vary"


class HandMade:
    """A trunk whose logits are written down: a row for each place that is asked."""

    context = None
    device = torch.device("cpu")

    def __init__(self, logits: list[list[float]]) -> None:
        self.table = torch.tensor(logits, dtype=torch.float64)

    def cache(self, tokens: Any) -> Any:
        return SimpleNamespace(layers=[], batch_select_indices=lambda rows: None)

    def logits(self, tokens: Any, where: Any, *, cache: Any) -> torch.Tensor:
        assert len(where) == len(self.table)
        return self.table


def test_scores_from_hand_made_logits():
    """Three words; prompt (0, 1); targets (2,) and (2, 0). Their stems are () and (2,): places 0 | 0, 1."""
    at_prompt, after_two = [0.0, 0.0, math.log(2)], [math.log(8), 0.0, 0.0]  # p(2) = 1/2; p(0 | 2) = 8/10
    trunk: Any = HandMade([at_prompt, at_prompt, after_two])
    asked = [_Asked((0, 1), ((2,), (2, 0), (0,)))]
    likely, first = _ask_some(trunk, asked, [0])
    assert likely.tolist() == pytest.approx([math.log(1 / 2), math.log(1 / 2), math.log(0.8), math.log(1 / 4)])
    assert first.tolist() == [2, 2, 0, 2]
    one = _told((2, 0), likely[1:3].tolist(), first[1:3].tolist())
    assert one.nll == pytest.approx(-(math.log(0.5) + math.log(0.8)) / 2)
    assert (one.tokens, one.right, one.first) == (2, 2, 2)
    assert _told((0,), likely[3:].tolist(), first[3:].tolist()).right == 0
