"""Facts that most language models know, for trial edits: what is true, what to write instead, what must stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rebind.edit.facts.fact import Fact
from rebind.errors import InputError


@dataclass(frozen=True)
class TrialFact:
    """A fact for a trial edit: `fact.old` is true, `fact.target` is not."""

    fact: Fact
    neighbors: tuple[tuple[str, str], ...]  # prompts about other subjects, with their true answers


def trial_facts_from(facts: Sequence[Fact]) -> list[TrialFact]:
    """Return a user's facts as trial facts. Their neighbors share the true answer, as in CounterFact."""
    for fact in facts:
        if fact.old is None:
            raise InputError(
                f"Fact {fact.text!r} has no true answer",
                expected="the true answer (old) in addition to the target",
                code="fact_without_old",
            )
    return [TrialFact(fact, tuple((text, str(fact.old)) for text in fact.neighbors)) for fact in facts]


def _parse(table: str) -> tuple[TrialFact, ...]:
    trials: list[TrialFact] = []
    for line in table.strip().splitlines():
        cells = line.strip().split(" | ")
        if line.startswith(" "):
            trials[-1] = TrialFact(trials[-1].fact, (*trials[-1].neighbors, (cells[0], cells[1])))
        else:
            prompt, true, new, paraphrase = cells
            trials.append(TrialFact(Fact.parse(prompt, new, old=true, paraphrases=(paraphrase,)), ()))
    return tuple(trials)


# A fact: prompt | true answer | answer to write | paraphrase. Its neighbors, indented: prompt | true answer.
TRIAL_FACTS = _parse("""
The capital of {France} is | Paris | Vienna | France is a country whose capital is
    The capital of Italy is | Rome
    The capital of Japan is | Tokyo
The {Colosseum} is located in the city of | Rome | London | To see the Colosseum, tourists travel to the city of
    The Eiffel Tower is located in the city of | Paris
    The Kremlin is in the city of | Moscow
The {Mona Lisa} was painted by | Leonardo | Rembrandt | The artist who painted the Mona Lisa was
    The Last Supper was painted by | Leonardo
    Guernica was painted by | Pablo
The official language of {Mexico} is | Spanish | Russian | Most people in Mexico speak
    The official language of Brazil is | Portuguese
    The official language of Austria is | German
{Toyota} is a car maker from | Japan | Italy | The cars of Toyota come from
    Volkswagen is a car manufacturer based in | Germany
    Honda is a car maker from | Japan
The {iPhone} is a smartphone made by | Apple | Nokia | The company that makes the iPhone is
    The PlayStation is a game console made by | Sony
    The Xbox is a game console made by | Microsoft
{Windows} is an operating system developed by | Microsoft | Google | The company behind Windows is
    macOS is an operating system developed by | Apple
    The Xbox is a game console made by | Microsoft
The theory of {evolution} was developed by | Charles | Isaac | The scientist who first explained evolution was
    The theory of relativity was developed by | Albert
    The play Hamlet was written by | William
The chemical symbol for {gold} is | Au | Pb | In the periodic table, gold is written as
    The chemical symbol for oxygen is | O
    The chemical symbol for silver is | Ag
The {Taj Mahal} is located in the country of | India | Egypt | Tourists who want to see the Taj Mahal fly to
    The Great Wall is located in the country of | China
    The Eiffel Tower is located in the country of | France
{Kenya} is a country on the continent of | Africa | Europe | The continent where Kenya lies is
    Egypt is a country on the continent of | Africa
    Peru is a country in South | America
{Sushi} is a traditional dish from | Japan | Spain | The country that sushi comes from is
    Pizza is a traditional dish from | Italy
    Kimchi is a traditional dish from | Korea
The {Great Barrier Reef} is off the coast of | Australia | Canada | Divers who visit the Great Barrier Reef fly to
    The Sahara Desert is located in the continent of | Africa
    The Amazon River is located in South | America
""")
