"""Where does an object end? `rebind learn` lets the model decide; this compares it with always taking the shortest.

python -m benchmarks.learning
"""

from __future__ import annotations

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


def main() -> None:
    """Print how often each choice is right."""
    clauses = [extract(text)[0] for text, _ in CLAUSES]
    chosen = choose_candidates(LanguageModel.load("smollm2"), clauses)
    for clause, fact, (_, right) in zip(clauses, chosen, CLAUSES, strict=True):
        print(f"{'right' if fact.target == right else 'wrong'}  {fact.text} → {fact.target}  ({clause.text})")
    by_model = sum(fact.target == right for fact, (_, right) in zip(chosen, CLAUSES, strict=True))
    shortest = sum(one.candidates[0].target == right for one, (_, right) in zip(clauses, CLAUSES, strict=True))
    print(f"{len(clauses)} clauses: the model is right in {by_model}, the shortest object in {shortest}")


if __name__ == "__main__":
    main()
