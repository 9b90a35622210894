"""The search for targets: suffix only, from cached prefixes and the block above, against plain forward passes.

Both take the same facts in one batch and make the same steps; the plain one runs every prompt whole, through
every block, with logits everywhere, and adds δ in a hook, as public editing code does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.report import measure, report
from rebind.edit.editor import Editor
from rebind.edit.facts.fact import Fact
from rebind.edit.targets import FactPrompts, TargetSettings, find_targets

LAYER = 6
SETTINGS = TargetSettings(steps=13, enough=0.0)  # twelve updates
FACTS = [
    Fact.parse("The capital of {France} is", "Rome"),
    Fact.parse("The {Eiffel Tower} is in the city of", "London"),
    Fact.parse("{macOS} is developed by", "Microsoft"),
    Fact.parse("{Thailand} belongs to the continent of", "Africa"),
]


def plain(editor: Editor, requests: list[FactPrompts]) -> Tensor:
    """δ after the same steps, by whole forward passes."""
    rows, at, owner, spans = [], [], [], []
    for fact, request in enumerate(requests):
        for prompt in request.prompts:
            rows.append([*prompt.ids, *request.target])
            at.append(prompt.subject_last)
            owner.append(fact)
            spans.append((len(prompt.ids), request.target))
    subjects = [request.prompts[0].ids[: request.prompts[0].subject_last + 1] for request in requests]
    for fact, row in enumerate(subjects):
        rows.append([*row])
        at.append(len(row) - 1)
        owner.append(fact)
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    lines = torch.arange(len(rows))
    where, whose = torch.tensor(at), torch.tensor(owner)
    seen: list[Tensor] = []
    delta = torch.zeros(len(requests), editor.sites[0].d_v)

    def hook(_: object, __: object, out: Tensor) -> Tensor:
        seen.append(out.detach())
        moved = out.clone()
        moved[lines, where] = moved[lines, where] + delta[whose]
        return moved

    handle = editor.language_model.trunk.blocks[LAYER].register_forward_hook(hook)
    try:
        with torch.no_grad():
            editor.model(ids, attention_mask=mask)
        prompts = [len(request.prompts) for request in requests]
        bare = torch.tensor([sum(prompts[:fact]) for fact in range(len(requests))])
        length = seen[0][bare, where[bare]].norm(dim=-1)
        optimiser = torch.optim.Adam([delta.requires_grad_()], lr=SETTINGS.rate)
        original: Tensor | None = None
        for _ in range(SETTINGS.steps - 1):
            said = torch.log_softmax(editor.model(ids, attention_mask=mask).logits, dim=-1)
            loss = torch.zeros(())
            for line, (begin, target) in enumerate(spans):
                picked = said[line, torch.arange(len(target)) + begin - 1, torch.tensor(target)]
                loss = loss - picked.mean() / prompts[owner[line]]
            now = said[len(spans) + torch.arange(len(requests)), where[len(spans) :]]
            original = now.detach() if original is None else original
            loss = loss + SETTINGS.kl * (original.exp() * (original - now)).sum()
            loss = loss + (SETTINGS.decay * delta.norm(dim=-1) / length.square()).sum()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            with torch.no_grad():
                delta *= (SETTINGS.clamp * length / delta.norm(dim=-1)).clamp_max(1.0).unsqueeze(-1)
    finally:
        handle.remove()
    return delta.detach()


def main() -> None:
    editor = Editor("smollm2")
    requests = editor.fact_prompts(FACTS)

    def quick() -> Tensor:
        found = find_targets(editor.language_model.trunk, LAYER, requests, SETTINGS)
        return found.states - found.initial

    expected = plain(editor, requests)

    def error(delta: Tensor) -> float:
        return float((delta - expected).norm() / expected.norm())

    report(
        "targets",
        f"targets of {len(FACTS)} facts, {SETTINGS.steps - 1} steps, SmolLM2-135M",
        [
            measure("plain forward passes", lambda: plain(editor, requests), error, 1),
            measure("suffix only (ours)", quick, error, 3),
        ],
        baseline="plain forward passes",
        note="Error: of δ, against the plain one, in float32.",
    )


if __name__ == "__main__":
    main()
