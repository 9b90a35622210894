"""Score the answers of a record, and average scores over records, with intervals.

The scores in `FRAMED_SCORES` exist in every framing: `EA` behind the start tokens, and `EA_plain`, `EA_text` and
`EA_chat` in the other framings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from rebind.edit.facts.fact import Fact
from rebind.evals import metrics
from rebind.evals.answers import FRAMINGS
from rebind.evals.records import Record
from rebind.models.judging import says, says_of_subject
from rebind.storage import Row

FRAMED_SCORES = {  # name → meaning, in the order of the tables
    "free": "greedy decoding says the target; in a chat, the answer to a question does",
    "EA": "every target token is the first choice",
    "PA": "the same, on paraphrases",
    "ES": "new target likelier than the true one",
    "PS": "the same, on paraphrases",
    "NS": "true target still likelier, on neighbors",
    "S": "harmonic mean of ES, PS and NS",
}
OTHER_SCORES = {
    "free_paraphrases": "greedy decoding says the target, on paraphrases",
    "choice": "new target beats the old one and others of its kind",
    "portability": "share of tokens right, on consequences",
    "free_consequences": "greedy decoding says the consequence",
    "free_reversed": "greedy decoding says the subject, asked by the target",
    "locality": "first token as before the edit, on neighbors",
    "locality_kl": "nats, next token, on neighbors",
    "same_subject": "first token as before, same subject and other relation",
    "same_subject_kl": "nats, next token, same subject and other relation",
    "GE": "fluency: entropy of longer texts",
    "RS": "consistency: cosine with reference texts",
}

Scores = dict[str, float | None]  # None if a score does not apply to a record


def framed_name(name: str, framing: str) -> str:
    """Return the name of a score in a framing.

    >>> framed_name("EA", "start"), framed_name("EA", "chat")
    ('EA', 'EA_chat')
    """
    return name if framing == "start" else f"{name}_{framing}"


SCORES = (*(framed_name(name, framing) for framing in FRAMINGS for name in FRAMED_SCORES), *OTHER_SCORES)


def score_record(record: Record, row: Row, idf: Mapping[str, float] | None = None) -> Scores:
    """Return every score of a record except S; None if a score does not apply to it.

    Args:
        record: the facts and questions.
        row: the answers of the edited model, from `answer_records`.
        idf: inverse document frequencies of the words in the references, for RS.
    """
    facts = [_score_fact(fact, answers) for fact, answers in zip(record.facts, row["facts"], strict=True)]
    scores: Scores = dict.fromkeys(name for name in SCORES if not name.startswith("S"))
    scores |= {name: _apply(fmean, [fact[name] for fact in facts if fact[name] is not None]) for name in facts[0]}
    for framing, neighbors in row["neighbors"].items():
        answers = zip(record.neighbors, neighbors, strict=True)
        comparable = [answer for question, answer in answers if question.answer and question.answer == record.fact.old]
        scores[framed_name("NS", framing)] = _on_pairs(metrics.neighborhood_score, comparable)
    new, *others = [answer["nll"] for answer in row["choice"]]
    wordings = [
        [(answer["right"], answer["tokens"]) for answer in answers] for answers in row["consequences"] if answers
    ]
    texts, reference = row.get("texts", ()), " ".join(record.references)
    scores |= {
        "choice": float(new < min(others)) if others else None,
        "portability": _apply(metrics.portability, wordings),
        "GE": _apply(metrics.fluency, texts),
        "RS": metrics.consistency(" ".join(texts), reference, idf or {}) if texts and reference else None,
    }
    for name, questions in (("free_consequences", record.consequences), ("free_reversed", record.reversed)):
        pairs = zip(questions, row.get(name, ()), strict=False)
        said = [says(text, *question.answers) for question, text in pairs if question.answers]
        scores[name] = _apply(fmean, said)
    for name, group in (("locality", "neighbors"), ("same_subject", "same_subject")):
        changes = row.get("kept", {}).get(group, ())
        scores[name] = _apply(fmean, [change["same"] for change in changes])
        scores[f"{name}_kl"] = _apply(fmean, [change["kl"] for change in changes])
    return scores


def _score_fact(fact: Fact, row: Row) -> Scores:
    wrong = [] if fact.old is None else [fact.old]
    scores: Scores = {}
    for framing, answers in row.items():
        prompt, paraphrases, free = [answers["prompt"]], answers["paraphrases"], answers.get("free")
        if free is not None and framing == "chat":
            free = float(says_of_subject(free, fact.target, fact.subject, instead=wrong))
        elif free is not None:
            free = float(says(free, fact.target, instead=wrong))
        part = {
            "free": free,
            "EA": _on_counts(prompt),
            "PA": _on_counts(paraphrases),
            "ES": _on_pairs(metrics.efficacy_score, prompt),
            "PS": _on_pairs(metrics.efficacy_score, paraphrases),
        }
        scores |= {framed_name(name, framing): value for name, value in part.items()}
    texts = row["start"].get("free_paraphrases", ())
    return scores | {"free_paraphrases": _apply(fmean, [says(text, fact.target, instead=wrong) for text in texts])}


def _apply(metric: Callable[[Any], float], items: Sequence[Any]) -> float | None:
    return metric(items) if items else None


def _on_pairs(metric: Callable[[Sequence[metrics.Pair]], float], rows: Sequence[Row]) -> float | None:
    """Apply a metric to the (new, true) pairs of NLLs."""
    return _apply(metric, [(row["new"]["nll"], row["true"]["nll"]) for row in rows if "true" in row])


def _on_counts(rows: Sequence[Row]) -> float | None:
    return _apply(metrics.accuracy, [(row["new"]["right"], row["new"]["tokens"]) for row in rows])


def summarize(
    records: Sequence[Record], rows: Sequence[Row], *, seed: int = 0, rounds: int = 1000
) -> dict[str, dict[str, float]]:
    """Return the scores of records with their intervals: {name: {value, low, high, records}}."""
    idf = metrics.inverse_document_frequencies([" ".join(record.references) for record in records if record.references])
    scores = [score_record(record, row, idf) for record, row in zip(records, rows, strict=True)]
    columns = {name: [row[name] for row in scores] for name in SCORES if name in scores[0]}
    estimates = metrics.bootstrap(columns, seed=seed, rounds=rounds)
    return {
        name: {key: round(value, 6) for key, value in estimates[name].items()} for name in SCORES if name in estimates
    }
