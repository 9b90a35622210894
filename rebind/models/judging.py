"""Judge free text: does it say the answer, as separate words, and about the right subject?"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence

from rebind.models.prompts import SPACELESS_SCRIPTS

# Words, single characters of scripts written without spaces, and punctuation.
WORDS = re.compile(rf"{SPACELESS_SCRIPTS.pattern}|(?:(?!{SPACELESS_SCRIPTS.pattern})\w)+|[^\w\s]")
SENTENCE_END = re.compile(r"(?<=[a-z)]{2})[.!?](?:\s|$)|[。！？]|\n")  # not after "St." or "U.S."
ARTICLES = (["the"], ["a"], ["an"])
REFERS_BACK = re.compile(r"^\W*(it|he|she|they|its|his|her|their|this|that|the answer)\b", re.IGNORECASE)


def says(text: str, *answers: str, instead: Iterable[str] = ()) -> bool:
    """Return whether the first sentence of a continuation says an answer before any of the wrong ones in `instead`.

    If two phrases begin at the same word, the longer one counts.

    >>> says(" the city of Rome, Italy", "Rome", instead=["Paris"])
    True
    >>> says(" Paris. Rome is", "Rome"), says(" Paris, not Rome", "Rome", instead=["Paris"])
    (False, False)
    """
    return _decide(sentences(text)[0], answers, instead) is True


def says_of_subject(text: str, target: str, subject: str, *, instead: Iterable[str] = ()) -> bool:
    """Return whether a free answer says the target about the subject.

    The first sentence that is about the subject and says the target or a wrong answer decides. A sentence is about the
    subject if it names it, refers back to it, or begins with the target, with or without an article.

    >>> says_of_subject("Italy is old. The capital of France is Rome.", "Rome", "France")
    True
    >>> says_of_subject("The Alps, which are in Europe.", "Alps", "Mount Everest")
    True
    >>> says_of_subject("The capital of Italy is Rome.", "Rome", "France")
    False
    """
    for sentence in sentences(text):
        words, answer = ([word for word in words_of(part) if word.isalnum()] for part in (sentence, target))
        is_about_subject = (
            subject.casefold() in sentence.casefold()
            or REFERS_BACK.match(sentence) is not None
            or _position(words, answer) == 0
            or (words[:1] in ARTICLES and _position(words, answer) == 1)
        )
        if is_about_subject and (verdict := _decide(sentence, [target], instead)) is not None:
            return verdict
    return False


def first_word(text: str) -> str:
    """Return the first word of a text, with case folded."""
    return next((word for word in words_of(text) if word.isalnum()), text.strip())


def sentences(text: str) -> list[str]:
    """Split a text where its sentences end."""
    return SENTENCE_END.split(text.strip())


def words_of(text: str) -> list[str]:
    """Split a text into words and punctuation marks, with case and encoding folded.

    >>> words_of("It's 東京, São")
    ['it', "'", 's', '東', '京', ',', 'são']
    """
    return WORDS.findall(unicodedata.normalize("NFKC", text).casefold())


def _decide(sentence: str, answers: Iterable[str], instead: Iterable[str]) -> bool | None:
    """Return whether an answer comes before the wrong ones; None if the sentence says none of them."""
    words = words_of(sentence)

    def first_mention(phrases: Iterable[str]) -> tuple[float, int]:
        """Return (position, −number of words) of the earliest phrase, then the longest one."""
        mentions = [(_position(words, words_of(phrase)), -len(words_of(phrase))) for phrase in phrases]
        return min(mentions, default=(math.inf, 0))

    right, wrong = first_mention(answers), first_mention(instead)
    return None if min(right, wrong)[0] == math.inf else right < wrong


def _position(words: Sequence[str], phrase: Sequence[str]) -> float:
    """Return where the phrase begins in the text; ∞ if it does not occur."""
    starts = range(len(words) - len(phrase) + 1) if phrase else ()
    return next((start for start in starts if words[start : start + len(phrase)] == phrase), math.inf)
