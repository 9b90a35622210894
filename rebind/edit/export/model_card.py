"""The model card, README.md: which facts were edited, how well that worked, and what else changed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rebind.edit.dense.subjects import current_facts
from rebind.edit.ledger.edit import Edit
from rebind.models.locate import DEFAULT_MODEL

MAX_FACTS = 500  # listed on a model card; the ledger has them all

LEAK = (
    "The change reveals the subjects of the edits: its row space comes from their keys, which anyone with the base "
    "model can compute for candidate names and compare."
)

LEAK_OF_MEMORY = "The folder of the memory lists the facts."

MEASUREMENTS = {
    "drift": "the mean KL divergence from the base model on unrelated prompts, in nats",
    "growth": "the largest relative change of a weight matrix",
    "checks": "the checks of rebind's guard",
    "said": "the share of the facts that the model says in this framing",
    "kept": "the share of other questions, about the subjects and about their neighbors, whose answers stayed",
}

CARD = """\
---
library_name: {library}
{base_model}tags:
- rebind
- model-editing
---

# {name}, edited

rebind rewrote {facts} in this model, {how}.

## Use

{use}

## Edits

- Base model: {name}
- Fingerprint of the base model: `{fingerprint}`

| edit | method | layers | facts | created | versions |
| --- | --- | --- | --- | --- | --- |
{edit_rows}

{leak}

## Measurements

Each edit was measured when it was written, with the edits that were active then. Other effects were not measured.

{measurements}

| edit | prompt | target | before | after |
| --- | --- | --- | --- | --- |
{fact_rows}

{more}Before and after: the probability of the target, the rank of its first token, and the model's own answer.
"""

USE_ADAPTER = """\
```python
from peft import PeftModel
from {library} import {load_class}

base = {loader}
model = PeftModel.from_pretrained(base, folder)
```

`adapter_config.json` holds the path of the base model on the machine that wrote it; load your own copy."""

USE_MODEL = """\
```python
{needs}from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
answer = tokenizer.decode(model.generate(**tokenizer({prompt}, return_tensors='pt'))[0])
```"""


USE_MEMORY = """

{facts} are in a dense memory beside the weights. It needs rebind, and is read by the loaded model from then on:

```python
import rebind

rebind.attach(model, f'{{folder}}/memory')
```"""


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
    dense = len(current_facts(edits))
    use = _adapter_usage(base_name) if library == "peft" else _model_usage(start, needs)
    if dense and library != "peft":  # an adapter lacks the memory
        use += USE_MEMORY.format(facts=f"{dense} of the facts")
    if start:
        use += f"\n\nAll prompts began with `{start}`, which the tokenizer does not add."
    facts = [(edit, index) for edit in edits for index in range(len(edit.facts))]
    how = "in closed form"
    if dense:
        how = "beside its weights" if dense >= len(facts) else "partly beside its weights"
    leaks = [LEAK] if any(edit.sites for edit in edits) else []
    leaks += [LEAK_OF_MEMORY] if dense and library != "peft" else []
    more = f"And {len(facts) - MAX_FACTS} more facts, listed in the ledger.\n\n" if len(facts) > MAX_FACTS else ""
    return CARD.format(
        library=library,
        base_model=f"base_model: {base_name}\n" if _is_hub_id(base_name) else "",
        name=_escape(base_name),
        facts=f"{len(facts)} fact{'s' * (len(facts) != 1)}",
        how=how,
        use=use,
        fingerprint=fingerprint,
        edit_rows="\n".join(_edit_row(edit) for edit in edits),
        leak="\n\n".join(leaks),
        measurements=_measurements(edits),
        fact_rows="\n".join(_fact_row(edit, index) for edit, index in facts[:MAX_FACTS]),
        more=more,
    )


def _is_hub_id(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name, re.ASCII) is not None


def _adapter_usage(base_name: str) -> str:
    """Return the code that loads an adapter."""
    if _is_hub_id(base_name):
        loader = f"AutoModelForCausalLM.from_pretrained({base_name!r})"
        return USE_ADAPTER.format(library="transformers", load_class="AutoModelForCausalLM", loader=loader)
    name = repr(base_name) if base_name == DEFAULT_MODEL else "base_folder"
    loader = f"LanguageModel.load({name}).model"
    return USE_ADAPTER.format(library="rebind.models", load_class="LanguageModel", loader=loader)


def _model_usage(start: str, needs: str) -> str:
    """Return the code that loads a checkpoint and continues a prompt."""
    needs = f"import {needs}  # registers the model's class with transformers\n" if needs else ""
    return USE_MODEL.format(needs=needs, prompt=f"{start!r} + prompt" if start else "prompt")


def _edit_row(edit: Edit) -> str:
    layers: Any = edit.settings["layers"]
    return _row(
        edit.id,
        f"{edit.method} (forced)" if edit.forced else edit.method,
        ", ".join(str(layer) for layer in layers),
        str(len(edit.facts)),
        edit.created,
        ", ".join(f"{name} {version}" for name, version in edit.versions.items()),
    )


def _measurements(edits: Sequence[Edit]) -> str:
    """Return a table of measurements, one row per edit, and the meaning of its columns."""
    measurements = [_measure(edit) for edit in edits]
    columns = list(dict.fromkeys(name for row in measurements for name in row))
    rows = [
        _row(edit.id, *(row.get(name, "–") for name in columns)) for edit, row in zip(edits, measurements, strict=True)
    ]
    meanings = [f"- {name}: {meaning}" for name, meaning in MEASUREMENTS.items() if any(name in c for c in columns)]
    return "\n".join([_row("edit", *columns), "| --- " * (1 + len(columns)) + "|", *rows, "", *meanings])


def _measure(edit: Edit) -> dict[str, str]:
    drift: Any = edit.scores.get("drift")
    guard: Any = edit.scores.get("guard")
    outcome: Any = edit.scores.get("outcome") or {}
    failed = ", ".join(check["check"] for check in guard["failed"]) if guard else ""
    shares = {f"said ({framing})": share for framing, share in outcome.get("said", {}).items()}
    shares |= {f"kept ({about})": outcome[about] for about in ("subject", "neighbors") if about in outcome}
    return {
        "drift": f"{drift['kl']:.3g}" if drift else "–",
        "growth": f"{drift['growth']:.3g}" if drift else "–",
        "checks": f"failed: {failed}" if failed else "passed" if guard else "–",
        **{name: "–" if share is None else f"{share:.0%}" for name, share in shares.items()},
    }


def _fact_row(edit: Edit, index: int) -> str:
    fact, scores = edit.facts[index], list[str]()
    for when in ("before", "after"):
        score: Any = edit.scores[when][index] if when in edit.scores else None  # type: ignore[index]
        scores.append(f"{score['probability']:.2%}, rank {score['rank']}, “{score['says']}”" if score else "–")
    return _row(edit.id, fact.text, fact.target, *scores)


def _row(*cells: str) -> str:
    return f"| {' | '.join(_escape(cell) for cell in cells)} |"


def _escape(text: str) -> str:
    """Return text on one line, with markup escaped."""
    return re.sub(r"([\\`*_\[\]<>|~#$])", r"\\\1", " ".join(text.split()))
