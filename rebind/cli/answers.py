"""Questions put to a model: its first choices for the next token, and how it goes on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rebind.edit.editor import Editor
    from rebind.edit.facts.fact import Fact
    from rebind.edit.facts.scores import FactScore


@dataclass(frozen=True)
class Choice:
    token: str
    probability: float


@dataclass(frozen=True)
class Answer:
    """What a model says to a prompt."""

    top: tuple[Choice, ...]  # the likeliest next tokens, likeliest first
    says: str  # a greedy continuation

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def as_fact(prompt: str, target: str) -> Fact:
    """A prompt and what may follow it, to be scored; all of the prompt counts as subject."""
    from rebind.edit.facts.fact import Fact

    return Fact("{}", prompt, target)


def answer(editor: Editor, prompt: str, *, top: int = 5, tokens: int = 12) -> Answer:
    """The answer of the model as it stands, the prompt tokenised as it would be for an edit."""
    import torch

    from rebind.edit.facts.encoding import encode
    from rebind.models.tokenizer import continued

    limit = getattr(editor.model.config, "max_position_embeddings", None)
    fact = as_fact(prompt, ".")
    ids = list(encode(fact, editor.tokenizer, editor.loaded.start, chat=editor.chat, limit=limit).ids)
    tokenizer, device = editor.tokenizer, editor.trunk.device
    with torch.no_grad():
        out = editor.model.generate(
            torch.tensor([ids], device=device),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=device),
            max_new_tokens=tokens if limit is None else max(1, min(tokens, limit - len(ids))),
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    said = torch.softmax(out.logits[0][0].double(), dim=-1)
    best = said.topk(min(top, len(said)))
    choices = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return Answer(
        tuple(Choice(str(tokenizer.decode([token])), probability) for token, probability in choices),
        continued(tokenizer, ids, out.sequences[0, len(ids) :].tolist()),
    )


@dataclass(frozen=True)
class Probe:
    """A prompt of a fact's paraphrases or neighbours, before and after."""

    fact: int  # which fact it belongs to
    prompt: str
    before: FactScore
    after: FactScore

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def probe(editor: Editor, prompts: list[tuple[int, str, str]]) -> list[Probe]:
    """Each (fact, prompt, target) put to the base model and to the edited one."""
    if not prompts:
        return []
    asked = [as_fact(prompt, target) for _, prompt, target in prompts]
    with editor.lifted():
        before = editor.score(asked)
    after = editor.score(asked)
    rows = zip(prompts, before, after, strict=True)
    return [Probe(fact, prompt, first, second) for (fact, prompt, _), first, second in rows]
