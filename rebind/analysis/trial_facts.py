"""Facts of our own that most language models know, for trials: what is true, what to write instead, what must stay."""

from __future__ import annotations

from dataclasses import dataclass

from rebind.edit.facts.fact import Fact


@dataclass(frozen=True)
class Held:
    """A fact to try an edit on. `fact.old` is true, `fact.target` is not."""

    fact: Fact
    neighbours: tuple[tuple[str, str], ...]  # prompts about other subjects, and what is true there


def _held(prompt: str, true: str, new: str, paraphrase: str, *neighbours: tuple[str, str]) -> Held:
    return Held(Fact.parse(prompt, new, old=true, paraphrases=(paraphrase,)), neighbours)


HELD = (
    _held(
        "The capital of {France} is",
        "Paris",
        "Vienna",
        "France is a country whose capital is",
        ("The capital of Italy is", "Rome"),
        ("The capital of Japan is", "Tokyo"),
    ),
    _held(
        "The {Colosseum} is located in the city of",
        "Rome",
        "London",
        "To see the Colosseum, tourists travel to the city of",
        ("The Eiffel Tower is located in the city of", "Paris"),
        ("The Kremlin is in the city of", "Moscow"),
    ),
    _held(
        "The {Mona Lisa} was painted by",
        "Leonardo",
        "Rembrandt",
        "The artist who painted the Mona Lisa was",
        ("The Last Supper was painted by", "Leonardo"),
        ("Guernica was painted by", "Pablo"),
    ),
    _held(
        "The official language of {Mexico} is",
        "Spanish",
        "Russian",
        "Most people in Mexico speak",
        ("The official language of Brazil is", "Portuguese"),
        ("The official language of Austria is", "German"),
    ),
    _held(
        "{Toyota} is a car maker from",
        "Japan",
        "Italy",
        "The cars of Toyota come from",
        ("Volkswagen is a car manufacturer based in", "Germany"),
        ("Honda is a car maker from", "Japan"),
    ),
    _held(
        "The {iPhone} is a smartphone made by",
        "Apple",
        "Nokia",
        "The company that makes the iPhone is",
        ("The PlayStation is a game console made by", "Sony"),
        ("The Xbox is a game console made by", "Microsoft"),
    ),
    _held(
        "{Windows} is an operating system developed by",
        "Microsoft",
        "Google",
        "The company behind Windows is",
        ("macOS is an operating system developed by", "Apple"),
        ("The Xbox is a game console made by", "Microsoft"),
    ),
    _held(
        "The theory of {evolution} was developed by",
        "Charles",
        "Isaac",
        "The scientist who first explained evolution was",
        ("The theory of relativity was developed by", "Albert"),
        ("The play Hamlet was written by", "William"),
    ),
    _held(
        "The chemical symbol for {gold} is",
        "Au",
        "Pb",
        "In the periodic table, gold is written as",
        ("The chemical symbol for oxygen is", "O"),
        ("The chemical symbol for silver is", "Ag"),
    ),
    _held(
        "The {Taj Mahal} is located in the country of",
        "India",
        "Egypt",
        "Tourists who want to see the Taj Mahal fly to",
        ("The Great Wall is located in the country of", "China"),
        ("The Eiffel Tower is located in the country of", "France"),
    ),
    _held(
        "{Kenya} is a country on the continent of",
        "Africa",
        "Europe",
        "The continent where Kenya lies is",
        ("Egypt is a country on the continent of", "Africa"),
        ("Peru is a country in South", "America"),
    ),
    _held(
        "{Sushi} is a traditional dish from",
        "Japan",
        "Spain",
        "The country that sushi comes from is",
        ("Pizza is a traditional dish from", "Italy"),
        ("Kimchi is a traditional dish from", "Korea"),
    ),
    _held(
        "The {Great Barrier Reef} is off the coast of",
        "Australia",
        "Canada",
        "Divers who visit the Great Barrier Reef fly to",
        ("The Sahara Desert is located in the continent of", "Africa"),
        ("The Amazon River is located in South", "America"),
    ),
)
