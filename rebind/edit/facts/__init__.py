"""Facts: prompts with a marked subject, and the targets that a model should say.

- `fact`: `Fact`, a prompt with a marked subject and its target
- `conflicts`: facts that cannot be written together, or only as a compromise
- `relations`, `questions`: how people word relations and ask for them
- `extraction`: find facts in running text
- `readers`: `read_facts` for JSONL, JSON and CSV files, CounterFact, zsRE, Knowns and Python objects
"""

from __future__ import annotations

from rebind.edit.facts.conflicts import Conflict, conflicts, contradictions, shared_keys
from rebind.edit.facts.fact import Fact
from rebind.edit.facts.readers import Facts, read_facts

__all__ = ["Conflict", "Fact", "Facts", "conflicts", "contradictions", "read_facts", "shared_keys"]
