"""Other ways to ask for a fact: the user's, those of its relation in the catalog, or made by patterns of English.

>>> questions_of(Fact.parse("The capital of {France} is", "Rome"))
('What is the capital of France?', "What is the name of France's capital?")
>>> paraphrases_of(Fact.parse("The capital of {France} is", "Rome"))[:2]
('The capital city of France is called', "France's capital is")
>>> question_from_grammar(Fact.parse("{Marie Curie} was born in", "Rome"))
'Where was Marie Curie born?'

A prompt that neither the catalog nor a pattern fits has no questions and no paraphrases.
"""

from __future__ import annotations

import re

from rebind.edit.facts.fact import Fact
from rebind.edit.facts.relations import fill, relation_of

PARAPHRASES, QUESTIONS = 4, 2  # of the catalog, per fact

BE = "is|was|are|were"
NOUN_OF = re.compile(r"^the (?P<noun>.+ (?:of|in|for|by|from)) *$", re.IGNORECASE)
POSSESSIVE = re.compile(rf"^['’]s (?P<noun>.+?) (?P<be>{BE})\b *(?P<rest>.*)$")
PREDICATE = re.compile(rf"^,? *(?:which|who|that)? *(?P<be>{BE}|can|has been)\b *(?P<rest>.*)$")
VERB = re.compile(r"^,? *(?:which|who|that)? *(?P<verb>[a-z]+)\b *(?P<rest>.*)$")
PEOPLE = re.compile(r"^, *(?P<who>people|they|most people) (?P<verb>[a-z]+) *(?P<rest>.*)$")
NOUN_IN = re.compile(rf"^, *(?P<noun>(?:the|an?) .+?) (?P<be>{BE})\b.*$")
PARTICIPLE = re.compile(r"^, *(?P<participle>\w+(?:ed|wn)\b.*)$")
NAMED_NOUN = re.compile(r"^(?P<before>.*?)\bthe (?P<noun>\w+)(?: of)?$")
ARTICLE = re.compile(r"(?:^| )(?:the|an?|called|named)$")
PLACE = re.compile(r"(?:^| )(?P<preposition>in|at|on|near)$")
YEAR = re.compile(r"^\d{3,4}$")
PAST = {
    "died": "die", "debuted": "debut", "premiered": "premiere", "worked": "work", "lived": "live", "played": "play",
    "originated": "originate", "spoke": "speak", "wrote": "write", "passed": "pass", "became": "become",
    "founded": "found", "won": "win", "opened": "open", "grew": "grow", "studied": "study", "found": "find",
    "took": "take", "began": "begin", "made": "make", "used": "use", "had": "have", "lost": "lose", "came": "come",
}  # fmt: skip


def questions_of(fact: Fact) -> tuple[str, ...]:
    """Return questions that a fact answers; none where the prompt is neither in the catalog nor fits a pattern."""
    if fact.questions:
        return tuple(fact.questions)
    own, relation = question_from_grammar(fact), relation_of(fact)
    if own is not None and "?" in fact.text:
        return (own,)
    if relation is not None and relation.questions:
        return tuple(fill(question, fact) for question in relation.questions[:QUESTIONS])
    return () if own is None else (own,)


def paraphrases_of(fact: Fact) -> tuple[str, ...]:
    """Return other wordings of a prompt."""
    if fact.paraphrases:
        return tuple(fact.paraphrases)
    relation = relation_of(fact)
    if relation is None:
        return tuple(_paraphrases_from_grammar(fact))
    wordings = [fill(wording, fact) for wording in relation.wordings]
    return tuple(wording for wording in wordings if wording != fact.text)[:PARAPHRASES]


def question_from_grammar(fact: Fact) -> str | None:
    """Return the question that a fact answers, or None where the prompt fits no pattern."""
    before, after = (part.strip() for part in fact.parts)
    subject = fact.subject
    if "?" in fact.text:
        return fact.text[: fact.text.index("?") + 1] if subject in fact.text[: fact.text.index("?")] else None
    if match := NOUN_OF.match(before):
        predicate = PREDICATE.match(after)
        noun = f"the {match['noun'].lower() if match['noun'].istitle() else match['noun']} {subject}"
        return predicate and _ask(fact, predicate["be"], noun, predicate["rest"])
    if before.lower() == "in":
        if people := PEOPLE.match(after):
            return f"What do {people['who']} {people['verb']} in {subject}?"
        noun_in = NOUN_IN.match(after)
        return noun_in and f"What {noun_in['be']} {noun_in['noun']} in {subject}?"
    if before:
        return None
    if match := POSSESSIVE.match(after):
        return _ask(fact, match["be"], f"{subject}'s {match['noun']}", match["rest"])
    if match := PREDICATE.match(after):
        return _ask(fact, match["be"], subject, match["rest"])
    if match := PARTICIPLE.match(after):
        return _ask(fact, "was", subject, match["participle"])
    match = VERB.match(after)
    if match and match["verb"] in PAST:
        return _ask(fact, "did", subject, f"{PAST[match['verb']]} {match['rest']}".strip())
    if match and match["verb"].endswith("s") and len(match["verb"]) > 2:
        return _ask(fact, "does", subject, f"{_infinitive(match['verb'])} {match['rest']}".strip())
    return None


def _paraphrases_from_grammar(fact: Fact) -> list[str]:
    """Return "{S}'s R is" for "The R of {S} is", and the other way around."""
    before, after = fact.parts
    possessive = POSSESSIVE.match(after)
    if not before.strip() and possessive:
        rest = f" {possessive['rest']}" if possessive["rest"] else ""
        return [f"The {possessive['noun']} of {fact.subject} {possessive['be']}{rest}"]
    noun_of = NOUN_OF.match(before.strip())
    if noun_of and noun_of["noun"].endswith(" of") and PREDICATE.match(after):
        return [f"{fact.subject}'s {noun_of['noun'].removesuffix(' of')}{after}"]
    return []


def _ask(fact: Fact, auxiliary: str, noun: str, rest: str) -> str:
    """Return "What/Where/When/Who <auxiliary> <noun> <rest>?"."""
    rest = ARTICLE.sub("", rest).strip()
    place, named = PLACE.search(rest), NAMED_NOUN.match(rest)
    is_number = fact.target[:1].isdigit()
    if named:
        word, rest = f"What {named['noun']}", named["before"].strip()
    elif place and (YEAR.match(fact.target) or not is_number):
        word, rest = ("When" if is_number else "Where"), rest[: place.start()].strip()
    elif rest.endswith(" by") or rest == "by":
        word = "Who"
    else:
        word = "What"
    return " ".join(part for part in (word, auxiliary, noun, rest) if part) + "?"


def _infinitive(verb: str) -> str:
    if verb == "has":
        return "have"
    if verb.endswith("ies"):
        return verb[:-3] + "y"
    return verb[:-2] if verb.endswith(("sses", "shes", "ches", "xes", "goes")) else verb[:-1]
