"""What the base model says about a subject: other relations, which an edit should keep, and how it answers in a chat.

The kind of the subject is read off the model, the prompts come from a catalog of relations of that kind
(`rebind.edit.facts.relations`) and from the user (`Fact.keep`). A prompt that the base model answers with the old or
the new target is the changed relation in other words, and is left out.

In a chat the assistant answers in words of its own. Where these lead up to the old target, the fact is searched for
behind the same words. And where the user asks about the subject in general, the first words of the answer stay: a model
that begins to talk about something else says the new target of that.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor

from rebind.edit.facts.fact import Fact
from rebind.edit.facts.questions import paraphrases_of, questions_of
from rebind.edit.facts.relations import HELD_OUT, KIND_WORDS, PROTECTED_SUBJECTS, RELATIONS, fill, relation_of
from rebind.edit.targets.framings import mark_subject, without_sink
from rebind.errors import FactWarning
from rebind.models.language_model import LanguageModel
from rebind.models.prompts import EncodedPrompt, Prompt

WORDINGS = 2  # of a relation that are kept, at most
AT_ONCE = 512  # prompts whose next tokens are read together
LEAD_TOKENS, OLD_TOKENS = 32, 6  # of the answer in a chat, and after the bare prompt
GENERAL_QUESTIONS = ("Tell me about {}.", "What do you know about {}?")  # asked in a chat
OPENING_TOKENS = 10  # of the answer to a general question, which stay
OLD_TARGET = re.compile(r"\s*[^.,;:!?\n]*")  # the first words of a continuation
# A kept prompt must not have the old or the new target among this many first choices. Where the catalog knows which
# relation changes, the others are told apart by it, and only those that the target itself would answer are left out.
RIVALS, RIVALS_OF_KNOWN = 50, 5


@dataclass(frozen=True)
class SubjectPrompts:
    """Prompts about the subject of a fact that do not ask for the fact itself."""

    kind: str = ""  # unknown where nobody asked the model
    kept: tuple[str, ...] = ()  # searched with
    held_out: tuple[str, ...] = ()  # only asked afterwards
    leads: Mapping[str, str] = field(default_factory=dict)  # question → the assistant's words before the old target
    openings: Mapping[str, str] = field(default_factory=dict)  # general question → the first words of the answer


def subject_prompts(model: LanguageModel, facts: Sequence[Fact], *, chat: bool = False) -> list[SubjectPrompts]:
    """Return what else to ask about each subject. The model must be the base model: it decides what applies.

    With `chat`, the model also answers the questions of each fact in its chat template.
    """
    silence: list[dict[str, str]] = [{} for _ in facts]
    leads, openings = chat_answers(model, facts) if chat else (silence, silence)
    kinds = subject_kinds(model, [fact.subject for fact in facts])
    listed = [_other_relations(fact, kind) for fact, kind in zip(facts, kinds, strict=True)]
    texts = [text for fact, own in zip(facts, listed, strict=True) for text in (fact.text, *chain(*own))]
    best = iter(first_choices(model, texts, RIVALS))
    new, old = (
        model.encode([fact.as_prompt(one) for fact, one in zip(facts, targets, strict=True)])
        for targets in ([fact.target for fact in facts], [fact.old or fact.target for fact in facts])
    )
    prompts = []
    for index, (fact, kind, own) in enumerate(zip(facts, kinds, listed, strict=True)):
        first = next(best)[0]
        avoid = {new[index].target[0], old[index].target[0]} | (set() if fact.old else {first})
        # Many prompts might be followed by the first digit of a number, so it says little there.
        rivals = RIVALS if relation_of(fact) is None and not fact.target[:1].isdigit() else RIVALS_OF_KNOWN
        kept, held_out = list(fact.keep), []
        for place, wordings in enumerate(own):
            usable = [text for text in wordings if not avoid & set(next(best)[:rivals])]
            if place % HELD_OUT == HELD_OUT - 1:
                held_out += usable[:1]
            else:
                kept += usable
        prompts.append(SubjectPrompts(kind, tuple(kept), tuple(held_out), leads[index], openings[index]))
    return prompts


def warn_of_unused_keep(facts: Sequence[Fact], weight: float) -> None:
    """Warn of prompts to keep that come from the user, where the search gives all kept prompts no weight."""
    with_prompts = [fact for fact in facts if fact.keep]
    if with_prompts and not weight:
        warnings.warn(
            f"The prompts to keep of {len(with_prompts)} facts are not used, for example "
            f"{with_prompts[0].keep[0]!r}: their weight in the search is 0, as it is by default in edits of very many "
            f"facts. A weight of 2 keeps the answers.",
            FactWarning,
            stacklevel=3,
        )


def _other_relations(fact: Fact, kind: str) -> list[list[str]]:
    """Return prompts for each relation of a kind of subjects but the one that the fact changes."""
    own = relation_of(fact)
    others = [one for one in RELATIONS if kind in one.kinds and one is not own]
    return [[fill(wording, fact) for wording in one.wordings[:WORDINGS]] for one in others]


def encode_kept(
    model: LanguageModel, facts: Sequence[Fact], about: Sequence[SubjectPrompts]
) -> list[tuple[EncodedPrompt, ...]]:
    """Encode the prompts to keep, with the subject marked; those without a usable mention of it are left out."""
    marked = []
    for fact, one in zip(facts, about, strict=True):
        texts = [(text, "") for text in one.kept] + [(question, words) for question, words in one.openings.items()]
        prompts = [(mark_subject(text, fact), words) for text, words in texts]
        marked.append([_to_keep(prompt, words) for prompt, words in prompts if prompt is not None])
    encoded = iter(model.encode([prompt for prompts in marked for prompt in prompts]))
    usable = [[without_sink(next(encoded)) for _ in prompts] for prompts in marked]
    return [tuple(prompt for prompt in prompts if prompt is not None) for prompts in usable]


def _to_keep(prompt: Prompt, opening: str) -> Prompt:
    """Return a prompt whose next token stays or, with an opening, a conversation in which these words stay."""
    return replace(prompt, text=opening, target="", question=prompt.text) if opening else replace(prompt, target="")


def encode_protected(
    model: LanguageModel, facts: Sequence[Fact], about: Sequence[SubjectPrompts]
) -> list[tuple[EncodedPrompt, ...]]:
    """Encode the prompt of each fact, and a paraphrase of it, with other subjects of the same kind in it."""
    subjects = {fact.subject for fact in facts}
    marked = []
    for fact, one in zip(facts, about, strict=True):
        others = [Fact(fact.prompt, name, fact.target) for name in PROTECTED_SUBJECTS[one.kind] if name not in subjects]
        texts = [(other, text) for other in others for text in (other.text, *paraphrases_of(other)[:1])]
        marked.append([prompt for other, text in texts if (prompt := mark_subject(text, other)) is not None])
    encoded = iter(model.encode([prompt for prompts in marked for prompt in prompts]))
    return [tuple(next(encoded) for _ in prompts) for prompts in marked]


def chat_answers(model: LanguageModel, facts: Sequence[Fact]) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return, for each fact, the words that the model says in a chat before the old target.

    The first are the words that lead up to the old target, by question of the fact; questions that the model answers
    without the old target are left out. The second are the openings of its answers to general questions about the
    subject. Where the user did not give the old target, it is what the model says after the bare prompt.
    """
    bare = model.encode([Prompt(fact.text) for fact in facts if not fact.old])
    said = iter(model.generate_encoded(bare, OLD_TOKENS))
    old = [fact.old or OLD_TARGET.match(next(said))[0] for fact in facts]  # type: ignore[index]
    leads: list[dict[str, str]] = [{} for _ in facts]
    for index, question, answer in _ask_in_chat(model, map(questions_of, facts), LEAD_TOKENS):
        place = _find_answer(answer, old[index])
        if place is not None:
            leads[index][question] = answer[:place].strip()
    general = [[fill(question, fact) for question in GENERAL_QUESTIONS] for fact in facts]
    openings: list[dict[str, str]] = [{} for _ in facts]
    for index, question, answer in _ask_in_chat(model, general, OPENING_TOKENS):
        places = [_find_answer(answer, target) for target in (old[index], facts[index].target)]
        words = answer[: min((place for place in places if place is not None), default=None)].strip()
        if words:
            openings[index][question] = words
    return leads, openings


def _ask_in_chat(
    model: LanguageModel, questions: Iterable[Sequence[str]], tokens: int
) -> Iterator[tuple[int, str, str]]:
    """Yield (index of the fact, question, answer) for the questions of every fact."""
    rows = [(index, question) for index, own in enumerate(questions) for question in own]
    encoded = model.encode([Prompt("", question=question) for _, question in rows])
    for (index, question), answer in zip(rows, model.generate_encoded(encoded, tokens), strict=True):
        yield index, question, answer


def _find_answer(text: str, target: str) -> int | None:
    """Return where a text says a target, or the first of its words that stand out; None if it does not.

    >>> _find_answer("It was invented by A. G. Bell.", "Alexander Graham Bell")
    25
    """
    telling = [word for word in target.split() if len(word) > 3 or word[0].isupper() or word.isdigit()]
    for phrase in (target, *telling):
        if match := re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", text):
            return match.start()
    return None


def subject_kinds(model: LanguageModel, subjects: Sequence[str]) -> list[str]:
    """Return the kind of each subject, by what the model expects after "{subject} is a"."""
    words = {
        kind: torch.tensor([model.encode([Prompt("It is a", word)])[0].target[0] for word in listed])
        for kind, listed in KIND_WORDS.items()
    }
    kinds = []
    for begin in range(0, len(subjects), AT_ONCE):
        prompts = [f"{subject} is a" for subject in subjects[begin : begin + AT_ONCE]]
        probabilities = model.next_token_log_probs(prompts, truncate=True).exp().cpu()
        scores = {kind: probabilities[:, ids.unique()].sum(-1) for kind, ids in words.items()}
        kinds += [max(scores, key=lambda kind: float(scores[kind][row])) for row in range(len(prompts))]
    return kinds


def first_choices(model: LanguageModel, texts: Sequence[str], count: int) -> list[list[int]]:
    """Return the most likely next tokens after each text, the best first."""
    choices: list[Tensor] = []
    for begin in range(0, len(texts), AT_ONCE):
        log_probs = model.next_token_log_probs(texts[begin : begin + AT_ONCE], truncate=True)
        choices.append(log_probs.topk(count, dim=-1).indices)
    return torch.cat(choices).tolist() if choices else []
