"""The metrics of the editing papers, one function each, on plain numbers and texts.

NLL is the negative log-likelihood of a target, averaged over its tokens so that long and short targets can be compared.
A pair is (NLL of the new target, NLL of the true one). A score is a mean over the prompts of one record; `bootstrap`
averages over records and computes confidence intervals.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from rebind.errors import InputError
from rebind.models.prompts import SPACELESS_SCRIPTS

Pair = tuple[float, float]  # NLL of the new target, of the true one
Values = NDArray[np.float64]

# Words, single characters of scripts written without spaces, and punctuation.
WORDS = re.compile(rf"{SPACELESS_SCRIPTS.pattern}|(?:(?!{SPACELESS_SCRIPTS.pattern})\w)+|[^\w\s]")


# Which target is likelier


def efficacy_score(pairs: Sequence[Pair]) -> float:
    """Return how often the new target is likelier than the true one: ES on the prompt, PS on the paraphrases.

    >>> efficacy_score([(0.5, 2.0), (3.0, 1.0)])
    0.5
    """
    return fmean(new < true for new, true in pairs)


def neighborhood_score(pairs: Sequence[Pair]) -> float:
    """Return how often the true target is still likelier than the new one, on prompts about other subjects: NS."""
    return fmean(true < new for new, true in pairs)


def harmonic_score(*scores: float) -> float:
    """Return S, the harmonic mean of ES, PS and NS, which is near zero as soon as one of them is.

    >>> round(harmonic_score(1.0, 0.5, 0.5), 3)
    0.6
    """
    if not scores or min(scores) < 0:
        raise InputError(
            f"The scores are {scores}", expected="at least one, and none below 0", code="scores_not_positive"
        )
    return 0.0 if min(scores) == 0 else len(scores) / sum(1 / score for score in scores)


def magnitude(pairs: Sequence[Pair]) -> float:
    """Return by how much the new target is more probable than the true one, p = exp(−NLL): EM, PM and −NM."""
    return fmean(math.exp(-new) - math.exp(-true) for new, true in pairs)


# What the model would say


def accuracy(counts: Sequence[tuple[int, int]]) -> float:
    """Return how often every token of the target is the first choice, from (right, tokens) per prompt: EA, PA.

    >>> accuracy([(2, 2), (1, 2)])
    0.5
    """
    return fmean(right == tokens for right, tokens in counts)


def token_accuracy(counts: Sequence[tuple[int, int]]) -> float:
    """Return the share of target tokens that are first choices, given the right tokens before them.

    On the prompt this is zsRE's efficacy, on the rephrased question its paraphrase score, and on the unrelated
    question with its true answer its specificity.

    >>> token_accuracy([(2, 2), (1, 2)])
    0.75
    """
    return fmean(right / tokens for right, tokens in counts)


def portability(questions: Sequence[Sequence[tuple[int, int]]]) -> float:
    """Return the token accuracy on consequences of the fact, using the best wording of each answer.

    >>> portability([[(1, 2), (2, 2)], [(0, 1)]])
    0.5
    """
    return fmean(max(right / tokens for right, tokens in wordings) for wordings in questions)


def locality(before: Sequence[int], after: Sequence[int]) -> float:
    """Return the share of prompts whose first answer token is unchanged: EasyEdit's locality."""
    return fmean(one == other for one, other in zip(before, after, strict=True))


def free_decoding(text: str, answers: Iterable[str], instead: Iterable[str] = ()) -> bool:
    """Return whether a generated text says an answer before it says any of the wrong answers in `instead`.

    If two phrases begin at the same word, the longer one counts.

    >>> free_decoding(" the city of Rome, Italy", ["Rome"], instead=["Paris"])
    True
    >>> free_decoding(" Paris. Rome is", ["Rome"], instead=["Paris"])
    False
    """
    said = min(_places(text, answers), default=None)
    other = min(_places(text, instead), default=(math.inf, 0))
    return said is not None and said < other


def _places(text: str, phrases: Iterable[str]) -> list[tuple[float, int]]:
    """Return (first position, −number of words) of each phrase that occurs in the text as whole words.

    Case and the encoding of accents are ignored. The smallest pair is the earliest phrase, then the longest.
    """
    words = words_of(text)
    found: list[tuple[float, int]] = []
    for phrase in phrases:
        wanted = words_of(phrase)
        starts = range(len(words) - len(wanted) + 1) if wanted else range(0)
        place = next((start for start in starts if words[start : start + len(wanted)] == wanted), None)
        if place is not None:
            found.append((place, -len(wanted)))
    return found


# How the model writes


def words_of(text: str) -> list[str]:
    """Split a text into words and punctuation marks, with case and encoding folded.

    >>> words_of("It's 東京, São")
    ['it', "'", 's', '東', '京', ',', 'são']
    """
    return WORDS.findall(unicodedata.normalize("NFKC", text).casefold())


def ngram_entropy(words: Sequence[str], n: int) -> float:
    """Return the entropy of the n-grams of a text, in bits.

    >>> ngram_entropy("a b a b a".split(), 2)
    1.0
    """
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
    having = Counter(word for document in documents for word in set(words_of(document)))
    return {word: math.log((1 + len(documents)) / (1 + count)) + 1 for word, count in having.items()}


def consistency(text: str, reference: str, idf: Mapping[str, float]) -> float:
    """Return RS: the cosine of the TF-IDF vectors of a text and a reference; unknown words weigh most."""
    rarest = max(idf.values(), default=1.0)
    one, other = (
        {word: count * idf.get(word, rarest) for word, count in Counter(words_of(part)).items()}
        for part in (text, reference)
    )
    lengths = math.hypot(*one.values()) * math.hypot(*other.values())
    return sum(weight * other.get(word, 0.0) for word, weight in one.items()) / lengths if lengths else 0.0


def perplexity(nll: float, tokens: int) -> float:
    """Return the perplexity of a text from the summed negative log-likelihood of its tokens.

    >>> round(perplexity(3 * math.log(8), 3), 6)
    8.0
    """
    return math.exp(nll / tokens) if nll / tokens < 700 else math.inf


# Confidence intervals


@dataclass(frozen=True)
class Estimate:
    """A mean over records with its confidence interval."""

    value: float
    low: float
    high: float
    records: int  # number of records that have this score


def bootstrap(
    columns: Mapping[str, Sequence[float | None]],
    joined: Mapping[str, Sequence[str]] | None = None,
    *,
    seed: int = 0,
    rounds: int = 1000,
    level: float = 0.95,
) -> dict[str, Estimate]:
    """Return the mean of each column with its percentile interval. A column has one value (or None) per record.

    Whole records are resampled, the same ones for every column. `joined` names harmonic means of columns: S is the
    harmonic mean of three means, not a mean of harmonic means. A column without any value is omitted.
    """
    names = [name for name, column in columns.items() if any(value is not None for value in column)]
    if not names:
        return {}
    table = np.array([[np.nan if v is None else v for v in columns[name]] for name in names], dtype=np.float64).T
    there = ~np.isnan(table)  # [records, columns]
    filled = np.where(there, table, 0.0)
    mixes = {
        mix: [names.index(part) for part in parts] for mix, parts in (joined or {}).items() if {*parts} <= {*names}
    }
    rng = np.random.default_rng(seed)
    drawn = np.stack([_means(filled, there, mixes, rng.integers(len(table), size=len(table))) for _ in range(rounds)])
    middle = _means(filled, there, mixes, np.arange(len(table)))
    tail = 100 * (1 - level) / 2
    low, high = np.nanpercentile(drawn, [tail, 100 - tail], axis=0)
    counts = [*there.sum(axis=0).tolist(), *(int(there[:, parts].all(axis=1).sum()) for parts in mixes.values())]
    rows = zip([*names, *mixes], middle.tolist(), low.tolist(), high.tolist(), counts, strict=True)
    return {name: Estimate(value, least, most, count) for name, value, least, most, count in rows}


def _means(
    filled: Values, there: NDArray[np.bool_], mixes: Mapping[str, Sequence[int]], rows: NDArray[np.int64]
) -> Values:
    """Return the mean of every column over some records, then the harmonic means of them."""
    counts = there[rows].sum(axis=0)
    sums = filled[rows].sum(axis=0)
    means = np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)
    joined = [_harmonic(means[list(parts)]) for parts in mixes.values()]
    return np.concatenate([means, np.array(joined, dtype=np.float64)])


def _harmonic(scores: Values) -> float:
    return math.nan if np.isnan(scores).any() else harmonic_score(*scores.tolist())
