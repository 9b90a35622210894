"""From answers to scores: which metric applies to which answers, and the means with their intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from rebind.edit.facts.fact import Fact
from rebind.evals import metrics
from rebind.evals.answers import rows_by_fact
from rebind.evals.records import Record
from rebind.storage import Row

SCORES = {  # name → meaning, in the order of the tables
    "S": "harmonic mean of ES, PS and NS",
    "ES": "new target likelier than the true one",
    "PS": "the same, on paraphrases",
    "NS": "true target still likelier, on neighbors",
    "EA": "every target token is the first choice",
    "PA": "the same, on paraphrases",
    "free": "greedy decoding says the target",
    "free_paraphrases": "the same, on paraphrases",
    "portability": "share of tokens right, on consequences",
    "free_consequences": "greedy decoding says the consequence",
    "locality": "first token unchanged, on neighbors",
    "tokens": "share of tokens right: zsRE's efficacy",
    "tokens_paraphrases": "the same, on paraphrases",
    "tokens_neighbors": "the same, on neighbors: specificity",
    "EM": "p(new) − p(true)",
    "PM": "the same, on paraphrases",
    "NM": "p(true) − p(new), on neighbors",
    "GE": "fluency: entropy of longer texts",
    "RS": "consistency: cosine with reference texts",
}
SHARES = ("S", "ES", "PS", "NS", "EA", "PA", "free", "free_paraphrases", "portability", "free_consequences", "locality")

Scores = dict[str, float | None]  # None where a record has nothing for a score


def score_record(record: Record, row: Row, base: Row, idf: Mapping[str, float] | None = None) -> Scores:
    """Return every score of a record but S, from the answers of the edited model and of the base model.

    Args:
        record: what was asked.
        row: the answers of the edited model, from `answer_records`.
        base: the answers of the base model.
        idf: weights of the words in the references, for RS.
    """
    facts = [_score_fact(fact, part) for fact, part in zip(record.facts, rows_by_fact(row), strict=True)]
    neighbors, old = row["neighbors"], record.fact.old
    asked = zip(record.neighbors, neighbors, strict=True)
    comparable = [answer for question, answer in asked if question.answer is not None and question.answer == old]
    before, after = ([answer["new"]["first"] for answer in side["neighbors"]] for side in (base, row))
    wordings = [[(one["right"], one["tokens"]) for one in answers] for answers in row["consequences"] if answers]
    free = zip(record.consequences, row.get("free", {}).get("consequences", ()), strict=False)
    texts, reference = row.get("texts", ()), " ".join(record.references)
    return {
        **{name: _apply(fmean, [fact[name] for fact in facts if fact[name] is not None]) for name in facts[0]},
        "NS": _on_pairs(metrics.neighborhood_score, comparable),
        "NM": _on_pairs(lambda pairs: -metrics.magnitude(pairs), comparable),
        "tokens_neighbors": _on_counts(metrics.token_accuracy, neighbors, "true"),
        "locality": metrics.locality(before, after) if after else None,
        "portability": _apply(metrics.portability, wordings),
        "free_consequences": _apply(
            fmean, [metrics.free_decoding(text, one.answers) for one, text in free if one.answers]
        ),
        "GE": _apply(metrics.fluency, texts),
        "RS": metrics.consistency(" ".join(texts), reference, idf or {}) if texts and reference else None,
    }


def _score_fact(fact: Fact, row: Row) -> Scores:
    prompt, paraphrases, free = [row["prompt"]], row["paraphrases"], row.get("free")

    def says_target(texts: Sequence[str]) -> float | None:
        wrong = [] if fact.old is None else [fact.old]
        return _apply(fmean, [metrics.free_decoding(text, [fact.target], wrong) for text in texts])

    return {
        "ES": _on_pairs(metrics.efficacy_score, prompt),
        "PS": _on_pairs(metrics.efficacy_score, paraphrases),
        "EA": _on_counts(metrics.accuracy, prompt),
        "PA": _on_counts(metrics.accuracy, paraphrases),
        "free": says_target([free["prompt"]] if free else []),
        "free_paraphrases": says_target(free["paraphrases"] if free else []),
        "tokens": _on_counts(metrics.token_accuracy, prompt),
        "tokens_paraphrases": _on_counts(metrics.token_accuracy, paraphrases),
        "EM": _on_pairs(metrics.magnitude, prompt),
        "PM": _on_pairs(metrics.magnitude, paraphrases),
    }


def _apply(metric: Callable[[Any], float], items: Sequence[Any]) -> float | None:
    return metric(items) if items else None


def _on_pairs(metric: Callable[[Sequence[metrics.Pair]], float], rows: Sequence[Row]) -> float | None:
    """Apply a metric to the (new, true) pairs of NLLs."""
    return _apply(metric, [(row["new"]["nll"], row["true"]["nll"]) for row in rows if "true" in row])


def _on_counts(
    metric: Callable[[Sequence[tuple[int, int]]], float], rows: Sequence[Row], target: str = "new"
) -> float | None:
    """Apply a metric to the (right, tokens) counts of one target."""
    return _apply(metric, [(row[target]["right"], row[target]["tokens"]) for row in rows if target in row])


def summarize(
    records: Sequence[Record], rows: Sequence[Row], base: Sequence[Row], *, seed: int = 0, rounds: int = 1000
) -> dict[str, dict[str, float]]:
    """Return every score that the records have, with its interval: {name: {value, low, high, records}}."""
    idf = metrics.inverse_document_frequencies([" ".join(record.references) for record in records if record.references])
    scores = [score_record(*answered, idf) for answered in zip(records, rows, base, strict=True)]
    columns = {name: [one[name] for one in scores] for name in SCORES if name != "S"}
    estimates = metrics.bootstrap(columns, seed=seed, rounds=rounds)
    return {
        name: {key: round(value, 6) for key, value in estimates[name].items()} for name in SCORES if name in estimates
    }
