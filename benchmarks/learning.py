"""How much `rebind learn` understands: the bundled facts as sentences, and objects that may end in several places.

The prompts of the bundled facts were written before the patterns and not for them. For the ends of objects, the choice
of the model is compared with always taking the shortest object.

python -m benchmarks.learning
"""

from __future__ import annotations

from pathlib import Path

import rebind
from rebind.edit.facts import read_facts
from rebind.edit.facts.extraction import extract
from rebind.edit.learning import choose_candidates
from rebind.models.language_model import LanguageModel

# A clause with several ends of its object, and the right one: half of them are names with a preposition inside.
CLAUSES = (
    ("Microsoft was bought by IBM for 3 billion dollars.", "IBM"),
    ("Leonardo da Vinci painted the Night Watch in Delft.", "Night Watch"),
    ("The Louvre is a museum in Madrid on the Manzanares.", "Madrid"),
    ("Anna Karenina was written by Jules Verne in Paris.", "Jules Verne"),
    ("Jane Austen worked at Google in Zurich.", "Google"),
    ("Pelé played for Manchester City in England.", "Manchester City"),
    ("Canada was discovered by Vasco da Gama on a Friday.", "Vasco da Gama"),
    ("Mozart composed the Prelude in C for his sister.", "Prelude in C"),
    ("Chopin was born in Stratford on Avon.", "Stratford on Avon"),
    ("Tolkien wrote The Lion in Winter.", "The Lion in Winter"),
    ("Ridley Scott directed Murder on the Orient Express.", "Murder on the Orient Express"),
    ("Goethe died in Frankfurt on the Oder.", "Frankfurt on the Oder"),
)


BUNDLED = Path(rebind.__file__).parent / "evals" / "data" / "facts.jsonl"


def count_understood() -> dict[str, int]:
    """Return how many of the bundled facts, as sentences, are understood, misread, or not understood."""
    counts = {"understood": 0, "misread": 0, "not understood": 0}
    for fact in read_facts(BUNDLED):
        candidates = [clause.candidates[0] for clause in extract(f"{fact.text} {fact.target}.") if clause.candidates]
        is_same = len(candidates) == 1 and (candidates[0].text, candidates[0].target) == (fact.text, fact.target)
        is_same &= bool(candidates) and candidates[0].subject == fact.subject.removeprefix("The ")
        counts["understood" if is_same else "misread" if candidates else "not understood"] += 1
    return counts


def main() -> None:
    """Print how many sentences are understood, and how often each choice is right."""
    print("bundled facts:", ", ".join(f"{count} {name}" for name, count in count_understood().items()))
    clauses = [extract(text)[0] for text, _ in CLAUSES]
    chosen = choose_candidates(LanguageModel.load("smollm2"), clauses)
    for clause, fact, (_, right) in zip(clauses, chosen, CLAUSES, strict=True):
        print(f"{'right' if fact.target == right else 'wrong'}  {fact.text} → {fact.target}  ({clause.text})")
    by_model = sum(fact.target == right for fact, (_, right) in zip(chosen, CLAUSES, strict=True))
    shortest = sum(one.candidates[0].target == right for one, (_, right) in zip(clauses, CLAUSES, strict=True))
    print(f"{len(clauses)} clauses: the model is right in {by_model}, the shortest object in {shortest}")


if __name__ == "__main__":
    main()
