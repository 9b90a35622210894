"""The model card: what was changed in a model, how well it worked and what else moved, as its README.md."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rebind.edit.ledger.edit import Edit
from rebind.models.locate import DEFAULT_MODEL

MAX_FACTS = 500  # facts on a model card: the ledger has longer lists
SIDE_EFFECTS = (
    "Side effects were measured when each edit was written, with the edits that were active then: drift is the mean "
    "KL divergence from the base model on unrelated prompts, in nats; growth is the largest relative change of a "
    "weight matrix; checks are those of rebind's guard. Other effects were not measured."
)


def model_card(
    edits: Sequence[Edit],
    base_name: str,
    fingerprint: str,
    *,
    library: str = "transformers",
    start: str = "",
    needs: str = "",
) -> str:
    """Return the README.md of an edited model or, with library "peft", of an adapter.

    `start` is the text of the start tokens, if the tokenizer does not add them by itself; `needs` is the module that
    registers the model's class with transformers, if one must be imported.
    """
    facts = [(edit, index) for edit in edits for index in range(len(edit.facts))]
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", base_name, re.ASCII) is not None
    more = [f"And {len(facts) - MAX_FACTS} more facts, listed in the ledger.", ""] if len(facts) > MAX_FACTS else []
    lines = [
        "---",
        f"library_name: {library}",
        *([f"base_model: {base_name}"] if on_hub else []),
        "tags:",
        "- rebind",
        "- model-editing",
        "---",
        "",
        f"# {_escape(base_name)}, edited",
        "",
        f"rebind rewrote {len(facts)} fact{'s' * (len(facts) != 1)} in this model, in closed form.",
        "",
        "## Use",
        "",
        *(_use_adapter(base_name, on_hub) if library == "peft" else _use_model(start, needs)),
        *([f"\nAll prompts began with `{start}`, which the tokenizer does not add."] if start else []),
        "",
        "## Edits",
        "",
        f"- Base model: {_escape(base_name)}",
        f"- Fingerprint of the base model: `{fingerprint}`",
        "",
        "| edit | method | layers | facts | created | versions | drift | growth | checks |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *(_edit_row(edit) for edit in edits),
        "",
        SIDE_EFFECTS,
        "",
        "| edit | prompt | target | before | after |",
        "| --- | --- | --- | --- | --- |",
        *(_fact_row(edit, index) for edit, index in facts[:MAX_FACTS]),
        "",
        *more,
        "Before and after: the probability of the target, the rank of its first token, and the model's own answer.",
    ]
    return "\n".join(lines) + "\n"


def _use_adapter(base_name: str, on_hub: bool) -> list[str]:
    library, name = ("transformers", "AutoModelForCausalLM") if on_hub else ("rebind.models", "LanguageModel")
    load = "AutoModelForCausalLM.from_pretrained({})" if on_hub else "LanguageModel.load({}).model"
    return [
        "```python",
        "from peft import PeftModel",
        f"from {library} import {name}",
        "",
        f"base = {load.format(repr(base_name) if on_hub or base_name == DEFAULT_MODEL else 'base_folder')}",
        "model = PeftModel.from_pretrained(base, folder)",
        "```",
        "",
        "`adapter_config.json` holds the path of the base model on the machine that wrote it; load your own copy.",
    ]


def _use_model(start: str, needs: str) -> list[str]:
    prompt = f"{start!r} + prompt" if start else "prompt"
    return [
        "```python",
        *([f"import {needs}  # registers the model's class with transformers"] if needs else []),
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        "model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)",
        f"answer = tokenizer.decode(model.generate(**tokenizer({prompt}, return_tensors='pt'))[0])",
        "```",
    ]


def _edit_row(edit: Edit) -> str:
    layers: Any = edit.settings.get("layers") or edit.sites
    drift: Any = edit.scores.get("drift") or {}
    guard: Any = edit.scores.get("guard")
    failed = ", ".join(check["check"] for check in guard["failed"]) if guard else ""
    checks = f"failed: {failed}" if failed else "passed" if guard else "–"
    return _row(
        edit.id,
        f"{edit.method} (forced)" if edit.forced else edit.method,
        ", ".join(str(layer) for layer in layers),
        str(len(edit.facts)),
        edit.created,
        ", ".join(f"{name} {version}" for name, version in edit.versions.items()),
        f"{drift['kl']:.3g}" if drift else "–",
        f"{drift['growth']:.3g}" if drift else "–",
        checks,
    )


def _fact_row(edit: Edit, index: int) -> str:
    fact = edit.facts[index]
    return _row(edit.id, fact.text, fact.target, *(_score(edit, when, index) for when in ("before", "after")))


def _score(edit: Edit, when: str, index: int) -> str:
    scores = edit.scores.get(when)
    if not isinstance(scores, Sequence) or not isinstance(score := scores[index], Mapping):
        return "–"
    return f"{score['probability']:.2%}, rank {score['rank']}, “{score['says']}”"


def _row(*cells: str) -> str:
    return f"| {' | '.join(_escape(cell) for cell in cells)} |"


def _escape(text: str) -> str:
    """Return text on one line, with no character of it read as markup."""
    return re.sub(r"([\\`*_\[\]<>|~#$])", r"\\\1", " ".join(text.split()))
