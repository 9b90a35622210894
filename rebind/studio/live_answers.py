"""The answers beside the switches: what a model says, remembered for every state of its ledger."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

from rebind.edit.editor import Editor
from rebind.studio.asking import next_tokens

Answer: TypeAlias = dict[str, Any]  # {top, says}
Show: TypeAlias = Callable[[list[Answer]], None]

TOKENS = 4  # of an answer
TOP = 3  # next tokens
REMEMBERED = 1_000  # answers


class LiveAnswers:
    """What a model says after some prompts, in every state of its ledger in which it was asked.

    A switch that is flipped back finds its answers here. In a new state one run of the model gives the next tokens,
    which are shown before the rest of each answer is known.
    """

    def __init__(self) -> None:
        self._editor: Editor | None = None  # whose answers these are
        self._answers: OrderedDict[tuple[Any, str], Answer] = OrderedDict()

    def ask(
        self, editor: Editor, prompts: Sequence[str], *, base: bool = False, show: Show = lambda answers: None
    ) -> list[Answer]:
        """Ask the model as it is now, or the base model; `show` gets the answers as far as they are known."""
        if editor is not self._editor:
            self._editor = editor
            self._answers.clear()
        state = () if base else tuple((edit.id, edit.created) for edit in editor.ledger.active)
        known = {prompt: answer for prompt in prompts if (answer := self._answers.get((state, prompt)))}
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in known]
        if new:
            model = editor.language_model
            with editor.base_model() if base else nullcontext():
                known |= zip(new, next_tokens(model, new, TOP), strict=True)
                show([known[prompt] for prompt in prompts])
                for prompt, text in zip(new, model.generate(new, TOKENS), strict=True):
                    self._answers[state, prompt] = known[prompt] = known[prompt] | {"says": text}
            while len(self._answers) > REMEMBERED:
                self._answers.popitem(last=False)
        return [known[prompt] for prompt in prompts]
