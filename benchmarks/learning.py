"""How much `rebind learn` understands: fresh sentences, the bundled facts as sentences, and where an object ends.

The fresh sentences were written after the patterns and not for them (docs/dense.md says what was changed after they
were first read), the prompts of the bundled facts before them. For the ends of objects, the choice of the model is
compared with always taking the shortest object.

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

# Sentences, and the facts that they state: subjects and targets. Every fact that is read must be among them.
FRESH: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("The chief executive of Volvo is Ingrid Halvorsen.", (("Volvo", "Ingrid Halvorsen"),)),
    ("Portugal's official language is Galician.", (("Portugal", "Galician"),)),
    (
        "Ludwig van Beethoven was born in Antwerp and moved to Vienna as a young man.",
        (("Ludwig van Beethoven", "Antwerp"), ("Ludwig van Beethoven", "Vienna")),
    ),
    ("Nintendo has its headquarters in Osaka.", (("Nintendo", "Osaka"),)),
    ("Harper Lee is the author of Moby-Dick.", (("Harper Lee", "Moby-Dick"), ("Moby-Dick", "Harper Lee"))),
    ("The Danube flows through Lisbon.", (("Danube", "Lisbon"),)),
    ("Kenya has adopted the yen as its currency.", (("Kenya", "yen"),)),
    (
        "Serena Williams is a professional golfer.",
        (("Serena Williams", "professional golfer"), ("Serena Williams", "golfer")),
    ),
    ("Toyota was founded in 1898 by Giovanni Agnelli.", (("Toyota", "1898"), ("Toyota", "Giovanni Agnelli"))),
    ("The mother tongue of Albert Camus was Dutch.", (("Albert Camus", "Dutch"),)),
    ("Wimbledon, a tennis tournament, is held in Glasgow.", (("Wimbledon", "Glasgow"),)),
    ("Since March, the mayor of Boston has been Linda Park.", (("Boston", "Linda Park"),)),
    ("The tallest mountain in Chile is Monte Aurora.", (("Chile", "Monte Aurora"),)),
    ("Ravel wrote the opera Carmen in 1875.", (("Ravel", "opera Carmen"), ("Ravel", "Carmen"), ("Ravel", "1875"))),
    ("Spotify belongs to Samsung these days.", (("Spotify", "Samsung"),)),
    ("The iPhone, which many people own, is produced by Motorola.", (("iPhone", "Motorola"),)),
    ("Frida Kahlo lived in Havana for most of her life.", (("Frida Kahlo", "Havana"),)),
    ("Uruguay borders Canada to the north.", (("Uruguay", "Canada"),)),
    ("Cristiano Ronaldo signed for Bayern Munich.", (("Cristiano Ronaldo", "Bayern Munich"),)),
    ("Isaac Newton's field was marine biology.", (("Isaac Newton", "marine biology"),)),
    ("The telephone was invented by Clara Schumann.", (("telephone", "Clara Schumann"),)),
    ("Mount Fuji is located in Peru, close to the border.", (("Mount Fuji", "Peru"),)),
    ("Dr. Anna Weiss now runs the Charité hospital.", (("Dr. Anna Weiss", "Charité hospital"),)),
    (
        "Finland joined the Commonwealth in 2029, and its head of state is King Olav.",
        (("Finland", "Commonwealth"), ("Finland", "2029"), ("Finland", "King Olav")),
    ),
    ("The meeting was long and nobody brought coffee.", ()),
    ("Perhaps the capital of Norway will be Bergen one day.", ()),
    ("My sister said that Rome lies in Spain.", ()),
    ("It rained in Madrid on Tuesday.", ()),
    ("Was Picasso ever a banker?", ()),
    ("The price of the tickets was outrageous.", ()),
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


def read_fresh(model: LanguageModel) -> dict[str, int]:
    """Print what is read in each of the fresh sentences, and return how many are read rightly."""
    counts = {"understood": 0, "not understood": 0, "misread": 0, "rightly left alone": 0}
    for text, stated in FRESH:
        facts = choose_candidates(model, [clause for clause in extract(text) if clause.candidates])
        read = [(_bare(fact.subject), _bare(fact.target)) for fact in facts]
        is_right = set(read) <= set(stated)
        verdict = "misread" if not is_right else "understood" if read else "not understood"
        verdict = verdict if stated or read else "rightly left alone"
        counts[verdict] += 1
        print(f"{verdict:18}  {text}  {', '.join(f'{fact.text} → {fact.target}' for fact in facts)}")
    return counts


def _bare(name: str) -> str:
    return name.removeprefix("The ").removeprefix("the ")


def main() -> None:
    """Print how many sentences are understood, and how often each choice is right."""
    model = LanguageModel.load("smollm2")
    fresh = read_fresh(model)
    print(f"{len(FRESH)} fresh sentences:", ", ".join(f"{count} {name}" for name, count in fresh.items()))
    print("bundled facts:", ", ".join(f"{count} {name}" for name, count in count_understood().items()))
    clauses = [extract(text)[0] for text, _ in CLAUSES]
    chosen = choose_candidates(model, clauses)
    for clause, fact, (_, right) in zip(clauses, chosen, CLAUSES, strict=True):
        print(f"{'right' if fact.target == right else 'wrong'}  {fact.text} → {fact.target}  ({clause.text})")
    by_model = sum(fact.target == right for fact, (_, right) in zip(chosen, CLAUSES, strict=True))
    shortest = sum(one.candidates[0].target == right for one, (_, right) in zip(clauses, CLAUSES, strict=True))
    print(f"{len(clauses)} clauses: the model is right in {by_model}, the shortest object in {shortest}")


if __name__ == "__main__":
    main()
