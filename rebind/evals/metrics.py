"""The metrics of the editing papers, one function each, on plain numbers and texts.

NLL is the negative log-likelihood of a target, averaged over its tokens so that long and short targets can be compared.
A pair is (NLL of the new target, NLL of the true one). A score is a mean over the prompts of one record; `bootstrap`
averages over records and computes confidence intervals.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np

from rebind.models.judging import words_of

PARTS_OF_S = ("ES", "PS", "NS")

Pair = tuple[float, float]  # NLL of the new target, of the true one


def efficacy_score(pairs: Sequence[Pair]) -> float:
    """Return how often the new target is likelier than the true one: ES on the prompt, PS on the paraphrases."""
    return fmean(new < true for new, true in pairs)


def neighborhood_score(pairs: Sequence[Pair]) -> float:
    """Return how often the true target is still likelier than the new one, on prompts about other subjects: NS."""
    return fmean(true < new for new, true in pairs)


def accuracy(counts: Sequence[tuple[int, int]]) -> float:
    """Return how often every token of the target is the first choice, from (right, tokens) per prompt: EA, PA."""
    return fmean(right == tokens for right, tokens in counts)


def portability(questions: Sequence[Sequence[tuple[int, int]]]) -> float:
    """Return the token accuracy on consequences of the fact, using the best wording of each answer.

    >>> portability([[(1, 2), (2, 2)], [(0, 1)]])
    0.5
    """
    return fmean(max(right / tokens for right, tokens in wordings) for wordings in questions)


def ngram_entropy(words: Sequence[str], n: int) -> float:
    """Return the entropy of the n-grams of a text, in bits."""
    grams = Counter(zip(*(words[start:] for start in range(n)), strict=False))
    total = sum(grams.values())
    return 0.0 - sum(count / total * math.log2(count / total) for count in grams.values())


def fluency(texts: Sequence[str]) -> float:
    """Return GE: 100 · mean of ½(⅔ H₂ + 4⁄3 H₃), the entropies of 2-grams and 3-grams; low for repetitive text.

    The factor of 100 is that of ROME's table.
    """
    return 100 * fmean(
        (2 / 3 * ngram_entropy(words, 2) + 4 / 3 * ngram_entropy(words, 3)) / 2 for words in map(words_of, texts)
    )


def inverse_document_frequencies(documents: Sequence[str]) -> dict[str, float]:
    """Return ln((1 + documents) / (1 + documents with the word)) + 1 for every word."""
    document_counts = Counter(word for document in documents for word in set(words_of(document)))
    return {word: math.log((1 + len(documents)) / (1 + count)) + 1 for word, count in document_counts.items()}


def consistency(text: str, reference: str, idf: Mapping[str, float]) -> float:
    """Return RS: the cosine of the TF-IDF vectors of a text and a reference; unknown words count as the rarest."""
    rarest = max(idf.values(), default=1.0)
    vector, reference_vector = (
        {word: count * idf.get(word, rarest) for word, count in Counter(words_of(part)).items()}
        for part in (text, reference)
    )
    lengths = math.hypot(*vector.values()) * math.hypot(*reference_vector.values())
    if not lengths:
        return 0.0
    return sum(weight * reference_vector.get(word, 0.0) for word, weight in vector.items()) / lengths


def perplexity(nll: float, tokens: int) -> float:
    """Return the perplexity of a text from the summed negative log-likelihood of its tokens."""
    return math.exp(nll / tokens) if nll / tokens < 700 else math.inf


def bootstrap(
    columns: Mapping[str, Sequence[float | None]], *, seed: int = 0, rounds: int = 1000
) -> dict[str, dict[str, float]]:
    """Return {value, low, high, records} of each score: its mean, 95% percentile interval, and number of records.

    A column has one value (or None) per record; a column without any value is omitted. Whole records are resampled,
    the same ones for every column. S is added in every framing that has its parts. It is the harmonic mean of three
    means, not a mean of harmonic means, which would be near zero as soon as one part is.
    """
    values = {name: column for name, column in columns.items() if any(value is not None for value in column)}
    if not values:
        return {}
    table = np.array(list(values.values()), dtype=np.float64).T  # [records, columns]; None becomes NaN
    count, rng = len(table), np.random.default_rng(seed)
    samples = [np.arange(count), *(rng.integers(count, size=count) for _ in range(rounds))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a sample may have no value in a column
        means = dict(zip(values, np.stack([np.nanmean(table[sample], axis=0) for sample in samples]).T, strict=True))
    counts = dict(zip(values, np.isfinite(table).sum(axis=0).tolist(), strict=True))
    for framing in [name.removeprefix("ES") for name in values if name.startswith("ES")]:
        parts = [part + framing for part in PARTS_OF_S]
        if values.keys() >= {*parts}:
            with np.errstate(divide="ignore"):  # the harmonic mean of 0 and anything is 0
                means[f"S{framing}"] = len(parts) / sum(1 / means[part] for part in parts)
            counts[f"S{framing}"] = sum(None not in row for row in zip(*(values[part] for part in parts), strict=True))
    estimates = {}
    for name, (mean, *resampled_means) in means.items():
        low, high = np.nanpercentile(resampled_means, [2.5, 97.5]).tolist()
        estimates[name] = {"value": float(mean), "low": low, "high": high, "records": counts[name]}
    return estimates
