"""Other ways to ask for a fact: the user's, those of its relation in the catalog, or made by patterns of English.

>>> questions_of(Fact.parse("The capital of {France} is", "Rome"))
('What is the capital of France?', "What is the name of France's capital?")
>>> paraphrases_of(Fact.parse("The capital of {France} is", "Rome"))[:2]
('The capital city of France is called', "France's capital is")
>>> questions_of(Fact.parse("The {Great Wall} was built in", "Peru"))
('Where was the Great Wall built?', 'Do you know where the Great Wall was built?')
>>> paraphrases_of(Fact.parse("The {Great Wall} was built in", "Peru"))
('The place where the Great Wall was built was',)

The patterns read a prompt as a clause whose last part is missing: a noun phrase with the subject in it, a verb, and the
words up to the gap. A prompt that neither the catalog nor a pattern fits has no questions and no paraphrases.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from rebind.edit.facts.fact import Fact
from rebind.edit.facts.relations import fill, relation_of

PARAPHRASES, QUESTIONS = 4, 2  # per fact

BE = "is|was|are|were"
ADVERBIAL = re.compile(r"^(?P<adverbial>(?:at|in|on|during|after|before) [^,]+), *(?P<rest>.*)$", re.IGNORECASE)
NOUN_PHRASE = re.compile(  # what may stand before the subject: "The", "The novel", "The color of a"
    r"^(?:|an?|the(?: \w+)?|an? \w+ of"
    r"|the (?P<noun>.+) (?P<preposition>of|in|for|by|from|on|to)(?: (?P<article>an?|the))?)$",
    re.IGNORECASE,
)
POSSESSIVE = re.compile(rf"^['’]s (?P<noun>.+?) (?=(?:{BE})\b)")
AUXILIARY = re.compile(rf"^,? *(?:(?:which|who|that) )?(?P<verb>{BE}|can|will|has been|have been)\b *(?P<rest>.*)$")
VERB = re.compile(r"^(?:,? *(?:which|who|that))? *(?P<verb>[a-z]+)\b *(?P<rest>.*)$")
PARTICIPLE = re.compile(r"^, *(?P<rest>\w+(?:ed|wn)\b.*)$")
PEOPLE = re.compile(r"^, *(?P<who>people|they|most people) (?P<verb>[a-z]+) *(?P<rest>.*)$")
NOUN_IN = re.compile(rf"^, *(?P<noun>(?:the|an?) .+?) (?P<be>{BE})\b.*$")
RELATIVE = re.compile(r"^(?:the|an?) .*?\b(?:that|which|who) (?P<verb>[a-z]+)\b *(?P<rest>.*)$")
KIND = re.compile(
    r"^(?:the|an?) (?:(?!the )[\w ])*?\b(?P<rest>(?:\w+ed (?:to|by|in|at|on)|in|at|on|near|from)(?: the)?)$"
)
NAMED_NOUN = re.compile(  # "from the English city of", "part of a mountain range called the"
    r"^(?P<before>.*?)\b(?:the (?P<noun>\w+|\w+ \w+(?= of))(?: of)?"
    r"|an? (?P<called>\w+(?: \w+)?) (?:called|named)(?: the)?)$"
)
PASSIVE = re.compile(r"^(?P<participle>\w+) by(?: (?:the|an?))?$")
PERSON_NOUN = re.compile(
    r"^the (?:\w+ ){0,2}?(?:man|woman|person|king|queen|monarch|president|minister|chancellor|leader|founder|author"
    r"|inventor|director|owner|winner|wife|husband|mother|father|captain|coach|head|creator|composer)\b"
)
TO_PERSON = ("by", "attributed to", "credited to", "married to")  # what "who" replaces
FILLER = re.compile(r"(?:^| )(?:the|an?|called|named|about|around|approximately|roughly)$")
PLACE = re.compile(r"(?:^| )(?:in|at|on|near)$")
NUMBER_WORD = r"\d[\d,.]*|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve"
COUNT = re.compile(rf"^(?:{NUMBER_WORD}) (?P<unit>[a-z]+)$")
DATE = re.compile(r"^(?:\d{3,4}$|(?:January|February|March|April|May|June|July|August|September|October|November"
                  r"|December)\b)")  # fmt: skip
PAST = {
    "died": "die", "debuted": "debut", "premiered": "premiere", "worked": "work", "lived": "live", "played": "play",
    "originated": "originate", "spoke": "speak", "wrote": "write", "passed": "pass", "became": "become",
    "founded": "found", "won": "win", "opened": "open", "grew": "grow", "studied": "study", "found": "find",
    "took": "take", "began": "begin", "made": "make", "used": "use", "had": "have", "lost": "lose", "came": "come",
    "ended": "end", "landed": "land", "fell": "fall", "started": "start", "happened": "happen", "moved": "move",
    "sank": "sink", "met": "meet", "received": "receive", "sold": "sell", "led": "lead", "joined": "join",
}  # fmt: skip
PAST_OF_PARTICIPLE = {
    "written": "wrote", "sung": "sang", "drawn": "drew", "taken": "took", "given": "gave", "shown": "showed",
    "known": "knew", "chosen": "chose", "driven": "drove", "flown": "flew", "worn": "wore", "stolen": "stole",
}  # fmt: skip


@dataclass(frozen=True)
class OpenClause:
    """A prompt whose last part is missing: "the Great Wall" "was" "built in"."""

    noun: str  # the noun phrase that the clause is about
    verb: str
    rest: str  # up to the gap
    adverbial: str = ""  # in front of the clause in the prompt
    auxiliary: str = ""  # with which a question begins; none: the verb itself
    infinitive: str = ""  # what a question has in place of a verb with an auxiliary

    @property
    def active(self) -> str:
        """The verb and the noun of a clause in the passive voice: "painted the Mona Lisa"; empty for other clauses."""
        passive = PASSIVE.match(self.rest)
        if passive is None or self.verb not in ("was", "were"):
            return ""
        return f"{PAST_OF_PARTICIPLE.get(passive['participle'], passive['participle'])} {self.noun}"

    def question_word(self, target: str) -> tuple[str, str]:
        """Return the word that asks for the target, and the words up to the gap that it leaves over."""
        if named := NAMED_NOUN.match(self.rest):
            noun = named["called"] or named["noun"]
            if noun in ("man", "woman", "person"):
                return "who", named["before"].strip()
            return f"what {noun if ' ' in noun else noun.lower()}", named["before"].strip()
        rest = FILLER.sub("", self.rest).strip()
        rest = rest if rest in ("called", "named") else FILLER.sub("", rest).strip()
        is_number, place = target[:1].isdigit(), PLACE.search(rest)
        if place and (DATE.match(target) or not is_number):
            return ("when" if DATE.match(target) else "where"), rest[: place.start()].strip()
        if rest.endswith("every"):
            return "how often", rest.removesuffix("every").strip()
        if self.infinitive and not rest and (count := COUNT.match(target)):
            return f"how many {count['unit']}", rest
        if rest.endswith("from") and (rest == "from" or self.infinitive == "come"):
            return "where", rest
        is_person = rest.endswith(TO_PERSON) or (not rest and PERSON_NOUN.match(self.noun))
        return ("who" if is_person else "what"), rest

    def question(self, target: str) -> str:
        """Return the clause as a question: "Where was the Great Wall built?"."""
        if self.active:
            return self._sentence("who", self.active) + "?"
        word, rest = self.question_word(target)
        auxiliary, *tail = (self.auxiliary or self.verb).split()  # "has been" goes around the noun
        return self._sentence(word, auxiliary, self.noun, *tail, self.infinitive, rest) + "?"

    def indirect_question(self, target: str) -> str:
        """Return the clause as part of a polite question: "Do you know where the Great Wall was built?"."""
        if self.active:
            return self._sentence("do you know who", self.active) + "?"
        word, rest = self.question_word(target)
        return self._sentence("do you know", word, self.noun, self.verb, rest) + "?"

    def cleft(self, target: str) -> str:
        """Return the clause with its gap at the end again: "The place where the Great Wall was built is"."""
        if self.active:
            return self._sentence("the one who", self.active, "was")
        word, rest = self.question_word(target)
        if not rest and not self.infinitive:
            return ""  # "What the Sun is is"
        if word == "where" and not rest.endswith("from"):
            word = "the place where"
        elif word == "when":
            word = "the year in which" if target.isdigit() else "the time when"
        elif word.startswith("what "):
            word = f"the {word.removeprefix('what ')} that"
        elif word == "who":
            word = "the one that"
        elif word != "what":
            return ""
        return self._sentence(word, self.noun, self.verb, rest, "was" if self.verb == "was" else "is")

    def _sentence(self, *words: str) -> str:
        adverbial = f"{self.adverbial}," if self.adverbial else ""
        return _sentence((adverbial, *words))


def questions_of(fact: Fact) -> tuple[str, ...]:
    """Return questions that a fact answers; none where the prompt is neither in the catalog nor fits a pattern."""
    if fact.questions:
        return tuple(fact.questions)
    relation, own = relation_of(fact), questions_from_grammar(fact)
    if relation is None or not relation.questions or "?" in fact.text:
        return tuple(own)
    listed = [fill(question, fact) for question in relation.questions]
    return tuple(dict.fromkeys([*listed, *own]))[:QUESTIONS]


def paraphrases_of(fact: Fact) -> tuple[str, ...]:
    """Return other wordings of a prompt."""
    if fact.paraphrases:
        return tuple(fact.paraphrases)
    relation = relation_of(fact)
    if relation is None:
        wordings = paraphrases_from_grammar(fact)
    else:
        wordings = [fill(wording, fact) for wording in relation.wordings]
    return tuple(wording for wording in wordings if wording != fact.text)[:PARAPHRASES]


def questions_from_grammar(fact: Fact) -> list[str]:
    """Return the questions that patterns make of the prompt, or the one that the prompt itself asks."""
    if "?" in fact.text:
        question = fact.text[: fact.text.index("?") + 1]
        return [question] if fact.subject in question else []
    before, after = (part.strip() for part in fact.parts)
    if before.lower() == "in":
        if people := PEOPLE.match(after):
            return [f"What do {people['who']} {people['verb']} in {fact.subject}?"]
        noun_in = NOUN_IN.match(after)
        return [f"What {noun_in['be']} {noun_in['noun']} in {fact.subject}?"] if noun_in else []
    clause = read_clause(fact)
    return [] if clause is None else [clause.question(fact.target), clause.indirect_question(fact.target)]


def paraphrases_from_grammar(fact: Fact) -> list[str]:
    """Return "{S}'s R is" for "The R of {S} is" and the other way around, and what fits other clauses."""
    before, after = fact.parts
    if not before.strip() and (possessive := POSSESSIVE.match(after)):
        return [f"The {possessive['noun']} of {fact.subject} {after[possessive.end() :]}"]
    phrase, clause = NOUN_PHRASE.match(before.strip()), read_clause(fact)
    if clause is None:
        return []
    if phrase and phrase["noun"] and clause.verb in BE.split("|"):
        subject = f"{phrase['article'] or ''} {fact.subject}".strip()
        topic = "When it comes to" if phrase["preposition"] in ("of", "for") else phrase["preposition"].title()
        others = [f"{topic} {subject}, the {phrase['noun']}{after}"]
        return [_sentence((f"{subject}'s {phrase['noun']}{after}",)), *others] if topic.startswith("When") else others
    return [cleft] if (cleft := clause.cleft(fact.target)) else []


def read_clause(fact: Fact) -> OpenClause | None:
    """Read the prompt of a fact as a clause; None if it fits no pattern."""
    before, after = fact.parts[0].strip(), fact.parts[1]
    adverbial = ""
    if match := ADVERBIAL.match(before):
        adverbial, before = match["adverbial"][0].lower() + match["adverbial"][1:], match["rest"]
    elif before.endswith(","):
        return None
    if not NOUN_PHRASE.match(before):
        return None
    noun = f"{before[:1].lower()}{before[1:]} {fact.subject}".strip()
    if possessive := POSSESSIVE.match(after):
        noun, after = f"{noun}'s {possessive['noun']}", after[possessive.end() :]
    clause = _read_predicate(noun, after.strip())
    return clause and replace(clause, adverbial=adverbial)


def _read_predicate(noun: str, after: str) -> OpenClause | None:
    """Read what follows the noun phrase of a clause."""
    if match := AUXILIARY.match(after):
        clause = OpenClause(noun, match["verb"], match["rest"])
        if relative := RELATIVE.match(clause.rest):
            return _lexical(noun, relative["verb"], relative["rest"]) or clause
        kind = KIND.match(clause.rest)
        if kind and kind["rest"].endswith("by"):  # "is a program developed by"
            return replace(clause, verb="was", rest=kind["rest"])
        return replace(clause, rest=kind["rest"]) if kind else clause
    if match := PARTICIPLE.match(after):
        return OpenClause(noun, "was", match["rest"])
    match = VERB.match(after)
    if match is None:
        return None
    if (lexical := _lexical(noun, match["verb"], match["rest"])) is not None:
        return lexical
    # The word may belong to the noun: "The Apollo 11 mission landed"
    follows = AUXILIARY.match(match["rest"]) or VERB.match(match["rest"])
    if follows is None or not (follows.re is AUXILIARY or follows["verb"] in PAST):
        return None
    return _read_predicate(f"{noun} {match['verb']}", match["rest"])


def _lexical(noun: str, verb: str, rest: str) -> OpenClause | None:
    """Return a clause with a full verb, which a question puts behind "do", "does" or "did"."""
    plural = noun.endswith("s") and not noun.endswith(("ss", "'s")) and not noun.startswith("the ")
    if verb in PAST:
        return OpenClause(noun, verb, rest, auxiliary="did", infinitive=PAST[verb])
    if verb.endswith("s") and len(verb) > 2 and not verb.endswith("ss"):
        return OpenClause(noun, verb, rest, auxiliary="does", infinitive=_infinitive(verb))
    if plural and not verb.endswith("ed"):
        return OpenClause(noun[0].lower() + noun[1:], verb, rest, auxiliary="do", infinitive=verb)
    return None


def _sentence(words: tuple[str, ...]) -> str:
    text = " ".join(word for word in words if word)
    return text[0].upper() + text[1:]


def _infinitive(verb: str) -> str:
    if verb == "has":
        return "have"
    if verb.endswith("ies"):
        return verb[:-3] + "y"
    return verb[:-2] if verb.endswith(("sses", "shes", "ches", "xes", "goes")) else verb[:-1]
