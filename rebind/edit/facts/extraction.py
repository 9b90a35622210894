"""Take facts out of running English text, by patterns and without a model.

A sentence is cut into clauses, and a clause at its first verb: what stands before it names the subject, what follows
ends with the object. The prompt of a fact is the clause up to the object. Where a clause can be read in several ways it
has several candidates, the likeliest first; `rebind.edit.learning` lets the model choose.

The patterns prefer to miss a fact rather than to invent one: a clause that is negated, hedged, reported or a question
has no candidates, and every piece of text that went into no candidate is returned as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from rebind.edit.facts.fact import Fact, template
from rebind.edit.facts.relations import KIND_WORDS, RELATIONS, relation_of

BE = "is|was|are|were|became"
# Verbs that an object follows, and verbs that need a preposition before it
TRANSITIVE = (
    "wrote|founded|invented|directed|painted|discovered|composed|married|won|owns|owned|makes|produces|speaks|spoke"
    "|plays|played|leads|led|created|developed|designed|built|acquired|bought|sells|joined|studied|published|borders"
)
INTRANSITIVE = (
    "died|lives|lived|works|worked|plays|played|studied|studies|belongs|belonged|comes|came|lies|stands|moved|premiered"
    "|debuted|originated|graduated|teaches|taught|serves|served|flows|grew up|began|started"
)
VERBS = f"{TRANSITIVE}|{INTRANSITIVE}|{BE}|has|had"
PREPOSITION = "in|into|at|on|by|for|from|with|after|as|to|near|of"
PARTICIPLE = (
    r"\w+ed|born|made|built|led|written|known|sold|held|won|run|sung|taught|bought|drawn|grown|spoken|driven|shown"
    "|found|set|cut|sent|chosen|worn|given|taken"
)
ARTICLE = re.compile(r"^(?:the|an?) ", re.IGNORECASE)
CAPITAL = "A-Z" + "".join(filter(str.isupper, map(chr, range(0xC0, 0x530))))  # with accents, Greek and Cyrillic
NOUN = "(?:[a-z]|[A-Z]{2})"  # how a common noun begins: "capital", "CEO"

# Words that refer to a subject named before: "She", "Its", "The company"
PRONOUN = "it|they|he|she|its|their|his|her"
PERSON_NOUNS = frozenset(word for word in KIND_WORDS["person"] if word.islower())
REFERRING_NOUN = "|".join(sorted({word for words in KIND_WORDS.values() for word in words if word.islower()}))
REFERENCE = re.compile(
    rf"^(?:(?P<pronoun>{PRONOUN})|(?:the|this) (?P<noun>{REFERRING_NOUN})(?= (?:{VERBS})\b))\b", re.IGNORECASE
)
PERSONAL, OWN = frozenset({"he", "she", "his", "her"}), frozenset({"its", "their", "his", "her"})
EXPLETIVE = re.compile(r"^it (?:is|was) (?:an? )?(?:\w+ ?){1,2}$", re.IGNORECASE)  # "It was a sad day"
ABBREVIATIONS = "Mr|Mrs|Ms|Dr|St|Jr|Sr|No|Prof|Inc|Corp|Ltd|Gen|Col|Rev|Capt|etc|vs|approx|Mt"
SENTENCE = re.compile(rf"(?<=\w\w)[.!?]+[\"”’)]*(?=\s+[\"“‘(]?[{CAPITAL}0-9]|\s*$)|\n")
SHORT_LINE = 50  # characters: a longer one may be wrapped, and goes on in the next line
ITEM = re.compile(r"\s*(?:[-*•#]+|\d+[.)])\s+|\s*$")  # how a line of a list begins, and an empty line
NOT_AN_END = re.compile(rf"\b(?:{ABBREVIATIONS})$")
# Where a new clause begins: its own subject and verb follow, or a verb whose subject is that of the clause before.
CLAUSE = re.compile(
    r"\s*[;:]\s+|\s+[–—-]\s+"
    rf"|,?\s+(?:and|but|while|whereas)\s+(?=(?:{VERBS})\b|(?:{PRONOUN})\b|the \w+ of\b"
    rf"|(?:the )?(?:[{CAPITAL}][\w.-]*\s+){{1,4}}(?:{VERBS})\b|(?:[{CAPITAL}][\w.-]* ?)+['’]s )"
)
LEADING = re.compile(
    r"^(?:(?:however|today|meanwhile|also|indeed|now|later|then|so|and|but|in fact|for example|of course),? "
    r"|(?:in|since|by|on|after|before|as of|during|until) [^,]{1,40}, |(?:in|since) (?:\w+ )?\d{4} )+",
    re.IGNORECASE,
)
APPOSITION = re.compile(rf"^(?P<head>[^,]+), (?P<apposition>[^,]+), (?=(?:{VERBS})\b)")
HEDGE = re.compile(
    r"\b(?:not|never|no longer|nobody|none|(?-i:may|can|will)|might|could|would|should|cannot|perhaps|maybe|probably"
    r"|possibly|if|unless|whether|allegedly|reportedly|rumou?red|said|says|say|believe[sd]?|thinks?|thought"
    r"|claim(?:s|ed)?|suppose|imagine|wish|almost|nearly|hardly|supposed|expected|likely|likes?|used to)\b|n['’]t\b|\?",
    re.IGNORECASE,
)
ADVERB = re.compile(r"\b(?:now|also|currently|officially|still|recently|originally|later|once|today|actually|first) ")
PREDICATE = re.compile(
    rf" (?P<be>{BE})(?: (?P<participle>{PARTICIPLE}))?(?: (?P<preposition>{PREPOSITION}))? "
    rf"| (?P<verb>{INTRANSITIVE}) (?:{PREPOSITION}) | (?P<transitive>{TRANSITIVE}) "
)
ROLE = re.compile(rf"^(?P<article>the|an?) (?P<noun>{NOUN}[\w -]*?) (?P<preposition>of|in|for|at) (?P<object>.+)$")
OBJECT_END = re.compile(
    r"[,;:(]| (?:which|who|whom|that|where|when|while|because|after|before|since|until|although|but|so|whose|with)\b"
)
INNER_PREPOSITION = re.compile(r" (?:in|on|at|from|for|by|to|as|near|during|between|under) ")
IN_YEAR = re.compile(r"^(?P<object>.*?) ?\bin (?:the year )?(?P<year>\d{3,4})$")
LEAD_IN = re.compile(  # "the city of", "the author": words before a name that belong to the prompt
    r"^(?:(?:the|an?) (?:city|town|village|year|country|state|continent|company|author|writer|poet|director|painter"
    rf"|composer|architect|engineer|label|genre|band|language)(?: of)? (?=[{CAPITAL}0-9])"
    r"|the (?:field|sport|game|genre|religion) of |the |an? )"
)
NO_NAME = frozenset({  # words that begin neither a name nor an object
    "i", "you", "we", "he", "she", "it", "they", "this", "that", "these", "those", "there", "here", "who", "what",
    "which", "when", "where", "why", "how", "some", "many", "most", "all", "one", "people", "everyone", "everybody",
    "nobody", "nothing", "something", "anyone", "his", "her", "its", "their", "our", "my", "your", "if", "and", "or",
    "but", "not", "to", "because", "very", "so", "too", "more", "less", "than", "only", "just", "about", "in", "on",
    "at", "of", "for", "by", "with", "from", "as", "into", "over", "been", "being",
})  # fmt: skip
LONGEST_CLAUSE, LONGEST_NAME, LONGEST_OBJECT = 50, 7, 7  # words
NO_OBJECT_FOLLOWS = ("because", "can", "People use {} to", "{} won the", "{} ends with")  # wordings: no noun follows


@dataclass(frozen=True)
class Clause:
    """A part of a sentence, the facts that it may state (at most one of which it does), and what they leave out."""

    text: str  # with pronouns replaced by what they refer to
    candidates: tuple[Fact, ...] = ()  # the likeliest first; none: the clause was not understood
    rest: str = ""  # of the clause, in no candidate


@dataclass(frozen=True)
class _Head:
    """A way to read what stands before the verb."""

    before: str
    subject: str
    after: str
    takes_name: bool  # whether a bare "is" and an object may follow, as in "The capital of {France} is"


@dataclass(frozen=True)
class _Antecedents:
    """What the next clause may refer to, with its article; empty where that is not certain."""

    subject: str = ""  # of a verb that stands alone
    thing: str = ""  # "it", "the company"
    person: str = ""  # "she", "the singer"


def extract(text: str) -> list[Clause]:
    """Return the clauses of a text, in order.

    >>> [clause.candidates[0].prompt for clause in extract("Marie Curie was born in Oslo. She died in Rome.")]
    ['{} was born in', '{} died in']
    """
    clauses: list[Clause] = []
    known = _Antecedents()
    for sentence in split_sentences(text.removeprefix("\ufeff")):  # the mark with which some editors begin a file
        for part in _split_clauses(sentence):
            words = LEADING.sub("", " ".join(part.split()).strip(" ,.!"))
            if not words:
                continue
            resolved = _resolve(words, known)
            new = list(_read_clause(resolved))
            clauses += new
            if new[0].candidates or resolved == words:
                known = _antecedents(new[0])
    return clauses


def split_sentences(text: str) -> list[str]:
    """Split a text where its sentences end; "Dr." and "St." do not end one."""
    pieces, begin = [], 0
    for end in SENTENCE.finditer(text):
        if "\n" in end[0]:
            line, _, next_line = text[: end.start()].rpartition("\n")[2], *text[end.end() - 1 :].partition("\n")[1:]
            if len(line) >= SHORT_LINE and not ITEM.match(next_line.partition("\n")[0]):
                continue
        elif NOT_AN_END.search(text[begin : end.start()]):
            continue
        mark = "?" if "?" in end[0] else ""
        pieces.append(text[begin : end.start()].strip().rstrip(".!") + mark)
        begin = end.end()
    pieces = [ITEM.sub("", piece, count=1) if ITEM.match(piece) else piece for piece in (*pieces, text[begin:].strip())]
    return [piece for piece in pieces if re.search(r"\w", piece)]


def _split_clauses(sentence: str) -> list[str]:
    """Split a sentence into clauses; what stands before "and" must have a verb, unlike in "War and Peace was ..."."""
    parts, begin = [], 0
    for joint in CLAUSE.finditer(sentence):
        if not joint[0].strip(" ,").isalpha() or re.search(rf"\b(?:{VERBS})\b", sentence[begin : joint.start()]):
            parts.append(sentence[begin : joint.start()])
            begin = joint.end()
    return [*parts, sentence[begin:]]


def _resolve(clause: str, known: _Antecedents) -> str:
    """Put what a clause refers to into the place of its pronoun, or before a verb that has no subject.

    >>> _resolve("its capital is Lyon", _Antecedents(thing="France"))
    "France's capital is Lyon"
    """
    if (match := REFERENCE.match(clause)) and not EXPLETIVE.match(clause):
        word = (match["pronoun"] or match["noun"]).lower()
        name = known.person if word in PERSONAL | PERSON_NOUNS else known.thing
        own = "'s" if word in OWN else ""
        return f"{name}{own}{clause[match.end() :]}" if name else clause
    is_verb = known.subject and re.match(rf"(?:{VERBS})\b", clause)
    return f"{known.subject} {clause}" if is_verb else clause


def _antecedents(clause: Clause) -> _Antecedents:
    """Return what the next clause may refer to.

    "She" is Linda after "The CEO of Twitter is Linda", and Ada after "The birthplace of Ada is Oslo": the catalog knows
    which relations are those of persons. "It" may be either after such a sentence, and is not resolved.
    """
    if not clause.candidates:
        word = rf"[{CAPITAL}][\w.-]*"
        name = re.match(rf"^((?:The )?{word}(?: {word})*) (?:[a-z]+(?:ed|s)|{VERBS})\b", clause.text)
        subject = name[1] if name and _is_name(_split_article(name[1])[1]) else ""
        return _Antecedents(subject, subject, subject)
    fact = clause.candidates[0]
    before, after = fact.parts
    relation = relation_of(fact)
    kinds = () if relation is None else relation.kinds
    is_person, is_other = "person" in kinds, bool(kinds) or re.search(r" by\b", after) is not None
    if after.startswith("'s") or ARTICLE.sub("", before):
        return _Antecedents("", "", fact.subject if is_person else fact.target if is_other else "")
    subject = before + fact.subject
    return _Antecedents(subject, "" if is_person else subject, fact.target if is_other and not is_person else subject)


def _read_clause(text: str) -> Iterator[Clause]:
    """Yield a clause with its candidates, and one more for a year behind the object ("in Oslo in 1867")."""
    if HEDGE.search(text) or REFERENCE.match(text) or len(text.split()) > LONGEST_CLAUSE:
        yield Clause(text)
        return
    plain, ignored = text, ""
    if apposition := APPOSITION.match(text):
        plain = f"{apposition['head']} {text[apposition.end() :]}"
        ignored = apposition["apposition"]
    plain = ADVERB.sub("", plain)
    readings = list(_unique((*_from_catalog(plain), *_from_grammar(plain))))
    year = next((reading.year for reading in readings if reading.year), None)
    candidates = tuple(reading.fact for reading in readings)
    rest = "; ".join(filter(None, (ignored, readings[0].rest if readings else "")))
    yield Clause(text, candidates, rest)
    if year is not None:
        yield Clause(text, (year,))


@dataclass(frozen=True)
class _Reading:
    fact: Fact
    rest: str = ""  # of the clause, behind the object
    year: Fact | None = None  # stated by the same clause


def _unique(readings: Iterable[_Reading]) -> Iterator[_Reading]:
    seen = set()
    for reading in readings:
        if (key := (reading.fact.text, reading.fact.subject, reading.fact.target)) not in seen:
            seen.add(key)
            yield reading


# (a) wordings of the catalog


@cache
def _wordings() -> tuple[re.Pattern[str], ...]:
    patterns = []
    for relation in RELATIONS:
        for wording in relation.wordings:
            if not wording.endswith(NO_OBJECT_FOLLOWS[:2]) and wording not in NO_OBJECT_FOLLOWS:
                before, after = (re.sub(r"\b(?:is|was)\b", "(?:is|was)", part) for part in wording.split("{}"))
                patterns.append(
                    re.compile(
                        rf"^(?P<before>(?i:{before})(?:[Tt]he )?)(?P<subject>.+?)(?P<after>{after}) (?P<object>.+)$"
                    )
                )
    return tuple(patterns)


def _from_catalog(clause: str) -> Iterator[_Reading]:
    for pattern in _wordings():
        if match := pattern.match(clause):
            before = match["before"][:1].upper() + match["before"][1:]
            head = _Head(before, match["subject"], match["after"], True)
            if _is_name(head.subject):
                yield from _readings(
                    head, "", match["object"], numbers=not head.after.endswith(("is", "was")), common=True
                )


# (b) patterns of English


def _from_grammar(clause: str) -> Iterator[_Reading]:
    """Cut a clause at its first verb, and read both sides."""
    predicate = PREDICATE.search(clause)
    if predicate is None:
        return
    begin, tail = clause[: predicate.start()], clause[predicate.end() :]
    for head in _heads(begin):
        verb = predicate[0].rstrip()
        is_bare = predicate["be"] and not (predicate["participle"] or predicate["preposition"])
        if predicate["participle"] and not predicate["preposition"]:
            continue  # "was founded" and no more; an object would need a preposition
        if not is_bare or (head.takes_name and predicate["be"] != "became"):
            yield from _readings(head, verb, tail, numbers=not is_bare)
        elif not head.takes_name:
            yield from _roles(head, verb, tail)


def _heads(text: str) -> Iterator[_Head]:
    """Yield the ways to find a subject in what stands before a verb."""
    possessive = re.match(rf"^(?P<subject>.+?)['’]s (?P<noun>{NOUN}[\w -]*)$", text)
    if possessive:
        article, name = _split_article(possessive["subject"])
        if _is_name(name):
            yield _Head(article, name, f"'s {possessive['noun']}", True)
        return
    noun_of = list(re.finditer(rf" (?:of|in|for|at|behind) (?:the )?(?:(?:{REFERRING_NOUN}) (?=[{CAPITAL}]))?", text))
    if noun_of and re.match(rf"^(?i:the|an?) {NOUN}", text):
        for match in noun_of:  # the longest name is the subject: "the Bank of Japan", and not "Japan"
            if _is_name(text[match.end() :]):
                yield _Head(text[0].upper() + text[1 : match.end()], text[match.end() :], "", True)
                return
        return
    article, name = _split_article(text)
    if _is_name(name, with_article=bool(article)):
        yield _Head(article, name, "", False)


def _roles(head: _Head, verb: str, tail: str) -> Iterator[_Reading]:
    """Read "X is the R of Y" in both directions, "X is a R in Y" in one, and "X is a Y"."""
    role = ROLE.match(tail)
    if role:
        text = f"{verb} {role['article']} {role['noun']} {role['preposition']}"
        if role["article"] == "the" and not head.before:
            for reading in _readings(head, text, role["object"]):
                article, name = _split_article(_whole(reading.fact, role["object"]))
                if _is_name(name, with_article=bool(article)):
                    inverse = Fact(
                        template(f"The {role['noun']} {role['preposition']} {article.lower()}", f" {_be(verb)}"),
                        name,
                        head.subject,
                    )
                    yield _Reading(inverse, reading.rest)
        yield from _readings(head, text, role["object"])
    elif ARTICLE.match(tail) and not tail.lower().startswith("the "):
        yield from _readings(head, verb, tail, common=True)


def _be(verb: str) -> str:
    return "is" if verb.strip() == "became" else verb.strip()


def _whole(fact: Fact, text: str) -> str:
    """Return an object with the article that was moved into the prompt."""
    article = ARTICLE.match(text)
    return f"{article[0] if article else ''}{fact.target}"


def _readings(head: _Head, verb: str, text: str, *, numbers: bool = False, common: bool = False) -> Iterator[_Reading]:
    """Yield a fact for every way to end the object; with `numbers`, a year behind it becomes a fact of its own.

    A bare lower-case word is an object where the catalog knows the relation or, with `common`, anywhere: otherwise it
    is more often an adjective, as in "The coast of Spain is beautiful".
    """
    end = OBJECT_END.search(text)
    object, rest = (text[: end.start()], text[end.start() :].strip(" ,;:()")) if end else (text, "")
    year = None
    if numbers and (in_year := IN_YEAR.match(object)):
        stem = re.sub(rf" (?:{PREPOSITION})$", "", head.after + verb)
        year = Fact(template(head.before, f"{stem} in the year"), head.subject, in_year["year"])
        object = in_year["object"]
    if numbers and re.fullmatch(r"\d{3,4}", object) and verb.endswith(" in"):
        yield _Reading(Fact(template(head.before, f"{head.after}{verb} the year"), head.subject, object), rest)
        return
    cuts = [match.start() for match in INNER_PREPOSITION.finditer(object)]
    for cut in _ends(object, [*cuts, len(object)]):
        lead = LEAD_IN.match(object)
        words = object[lead.end() if lead else 0 : cut].strip(" \"“”'")
        middle = f"{head.after}{verb}{' ' + lead[0].strip() if lead else ''}"
        if not _is_object(words) or (verb.strip() in BE.split("|") and re.fullmatch(PARTICIPLE, words)):
            continue  # "was moved" says nothing about an object
        fact = Fact(template(head.before, middle), head.subject, words)
        if lead or common or re.search(rf"[{CAPITAL}0-9]", words) or relation_of(fact) is not None:
            left = "; ".join(filter(None, (object[cut:].strip(), rest)))
            yield _Reading(fact, left, year)
    if year is not None and not cuts and not object.strip():
        yield _Reading(year, rest)


def _ends(object: str, cuts: list[int]) -> list[int]:
    """Return where an object can end: a name does not go on in lower case ("Rome as a child"), a year not at all."""

    def goes_on(begin: int, end: int) -> bool:
        if object[:begin].isdigit():
            return False
        is_name = re.search(rf"(?:^|\s)[{CAPITAL}]\S*$", object[:begin])
        return not is_name or bool(re.search(f"[{CAPITAL}]", object[begin:end]))

    return [cuts[0], *(end for begin, end in pairwise(cuts) if goes_on(begin, end))]


# What is a name


def _split_article(text: str) -> tuple[str, str]:
    article = ARTICLE.match(text)
    return (article[0], text[article.end() :]) if article else ("", text)


def _is_name(text: str, *, with_article: bool = False) -> bool:
    """Return whether words can name a subject: a capital letter or a digit, or an article before a short noun."""
    words = text.split()
    if not 1 <= len(words) <= LONGEST_NAME or {word.lower() for word in words[:1]} & NO_NAME:
        return False
    if text.isdigit() or re.search(rf"[,;:\"()]|\b(?:{BE}|has|had|which|who|that)\b", text):
        return False
    return bool(re.match(rf"[{CAPITAL}0-9]|\w+[A-Z]", text)) or (with_article and len(words) <= 2)


def _is_object(text: str) -> bool:
    """Return whether words can be an object: a short noun phrase."""
    words = text.split()
    if not 1 <= len(words) <= LONGEST_OBJECT or words[0].lower() in NO_NAME or words[-1].lower() in NO_NAME:
        return False
    return not re.search(rf"\b(?:{BE}|has|had|it|they|he|she|him|them)\b", text) and bool(re.search(r"\w", text))
