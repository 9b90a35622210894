"""The model card: what was changed in a model, and how well, as its README.md."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rebind.edit.ledger.edit import Edit
from rebind.models.locate import DEFAULT_MODEL

LISTED = 500  # facts on a model card: a longer list is for the ledger


def model_card(
    edits: Sequence[Edit],
    base_name: str,
    fingerprint: str,
    *,
    library: str = "transformers",
    start: str = "",
    needs: str = "",
) -> str:
    """README.md of an edited model (or, with library "peft", of an adapter): what was changed, how well, and its use.

    `start` is what stood before every prompt and the tokenizer does not put there by itself; `needs` the module that
    tells transformers of the model's class.
    """
    facts = [(edit, index) for edit in edits for index in range(len(edit.facts))]
    base = [f"base_model: {base_name}"] if _is_on_the_hub(base_name) else []
    front = ["---", f"library_name: {library}", *base, "tags:", "- rebind", "- model-editing", "---"]
    count = f"{len(facts)} fact{'' if len(facts) == 1 else 's'}"
    lines = [
        *front,
        "",
        f"# {_plain(base_name)}, edited",
        "",
        f"{count} rewritten with rebind, in closed form. The rest of the model is as it was.",
        "",
        "## Use",
        "",
        *_use(library, base_name, start, needs),
        "",
        "## Edits",
        "",
        f"- Base model: {_plain(base_name)}",
        f"- Fingerprint of the base: `{fingerprint}`",
        "",
        "| edit | method | layers | facts | made | with |",
        "| --- | --- | --- | --- | --- | --- |",
        *(_edit_row(edit) for edit in edits),
        "",
        "| edit | prompt | target | before | after |",
        "| --- | --- | --- | --- | --- |",
        *(_fact_row(edit, index) for edit, index in facts[:LISTED]),
    ]
    if len(facts) > LISTED:
        lines += ["", f"And {len(facts) - LISTED} more facts: the ledger has them all."]
    lines += ["", "Before and after: the target's probability and its first token's rank on the prompt; what was said."]
    return "\n".join(lines) + "\n"


def _use(library: str, base_name: str, start: str, needs: str) -> list[str]:
    if library == "peft":
        code = ["from peft import PeftModel", *_base(base_name), "", "model = PeftModel.from_pretrained(base, folder)"]
        told = ["`adapter_config.json` names the base as it lay where this was made; pass the one that you have."]
    else:
        prompt = f"{start!r} + prompt" if start else "prompt"
        code = [
            *([f"import {needs}  # transformers does not know the class without"] if needs else []),
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            "model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)",
            f"said = tokenizer.decode(model.generate(**tokenizer({prompt}, return_tensors='pt'))[0])",
        ]
        told = []
    if start:
        told += [f"Everything here was asked after `{start}`, which the tokenizer does not put in front by itself."]
    return ["```python", *code, "```", *(["", " ".join(told)] if told else [])]


def _base(name: str) -> list[str]:
    """Code that loads the base model."""
    if _is_on_the_hub(name):
        return [
            "from transformers import AutoModelForCausalLM",
            "",
            f"base = AutoModelForCausalLM.from_pretrained({name!r})",
        ]
    given = f"base = load_model({name!r}).model" if name == DEFAULT_MODEL else "base = load_model(base_folder).model"
    return ["from rebind.models.load import load_model", "", given]


def _is_on_the_hub(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name, re.ASCII) is not None


def _edit_row(edit: Edit) -> str:
    layers = edit.settings.get("layers")
    where = ", ".join(str(layer) for layer in layers) if isinstance(layers, Sequence) else ", ".join(edit.sites)
    versions = ", ".join(f"{name} {version}" for name, version in edit.versions.items())
    method = f"{edit.method} (forced)" if edit.forced else edit.method
    return _row(edit.id, method, where, str(len(edit.facts)), edit.created, versions)


def _fact_row(edit: Edit, index: int) -> str:
    fact = edit.facts[index]
    before, after = (_scored(edit, when, index) for when in ("before", "after"))
    return _row(edit.id, fact.text, fact.target, before, after)


def _scored(edit: Edit, when: str, index: int) -> str:
    scores = edit.scores.get(when)
    score = scores[index] if isinstance(scores, Sequence) and index < len(scores) else None
    if not isinstance(score, Mapping):
        return "–"
    probability, rank, says = (score.get(name) for name in ("probability", "rank", "says"))
    parts = [
        f"{probability:.2%}" if isinstance(probability, float) else "",
        f"rank {rank}" if isinstance(rank, int) else "",
        f"“{says}”" if isinstance(says, str) else "",
    ]
    return ", ".join(part for part in parts if part) or "–"


def _row(*cells: str) -> str:
    return f"| {' | '.join(_plain(cell) for cell in cells)} |"


def _plain(text: str) -> str:
    """Text as it stands, on one line: no character of it is markup."""
    return re.sub(r"([\\`*_\[\]<>|~#$])", r"\\\1", " ".join(text.split()))
