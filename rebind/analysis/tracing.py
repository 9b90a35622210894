"""Causal tracing: which hidden states carry a fact from its subject to the answer (ROME, section 2).

Three runs of one prompt:

- *clean*: the model gives the answer the probability P;
- *corrupted*: noise is added to the embeddings of the subject's tokens, and the probability falls to P*;
- *corrupted with restoration*: as before, but one state, at one token and one layer, is put back to what it was in the
  clean run. The probability that comes back, P*(restored) − P*, is that state's *indirect effect*.

A state is a block's output (`hidden`), or what the MLP (`mlp`) or attention (`attention`) adds to it. The latter two
are restored over a window of layers: one layer's contribution alone hardly shows.

The plain way is one full pass for every token, layer, kind and draw of noise. Here nearly all of it is known before
it is run, and left out; the result is the same:

- below the restored layer everything is the corrupted run: a pass starts above it, from kept hidden states;
- in front of the restored token everything is the corrupted run, at every layer: a pass holds only what comes after, on
  top of the corrupted run's keys and values;
- in front of the subject nothing was corrupted, and restoring it has no effect;
- the output head is asked about the last position alone;
- all draws of noise, and as many tokens as pay, go through together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rebind.analysis.mixers import mixer_outputs
from rebind.analysis.traces import Question, Trace, TraceSettings, ask
from rebind.edit.facts.fact import Fact
from rebind.errors import InputError, NumericalError
from rebind.models.sites import Site, module_at
from rebind.models.trunk import Hidden, Tokens, Trunk, select_cache

if TYPE_CHECKING:
    from rebind.edit.editor import Editor

CPU_TOKENS, GPU_TOKENS = 96, 16_384  # a pass: on a CPU large enough for a matrix product to be efficient, no larger
ENTRIES_AT_ONCE = 1 << 24  # of the embedding table


@dataclass(frozen=True, eq=False)
class _Run:
    """What one run left behind."""

    hidden: list[Hidden]  # each block's output
    parts: dict[str, list[Hidden]]  # what MLPs and attention added
    logits: Tensor  # at the last position, [rows, vocabulary]


@dataclass(frozen=True, eq=False)
class _Group:
    """Restorations that go through the model together: row = token-major, draw of noise within."""

    begin: int  # the first token that is run; those in front come from the cache
    tokens: Tokens
    cache: Any
    restored: Tensor  # [rows]: the token restored in each
    draw: Tensor  # [rows]: the draw of noise in each
    where: Tensor  # [rows, 2]: the last position of each

    def of(self, states: Tensor) -> Tensor:
        """Each row's share of something the corrupted run has, [draws, tokens, width]."""
        return states[self.draw.to(states.device), self.begin :]

    def with_restored(self, states: Tensor, clean: Tensor) -> Tensor:
        """States [rows, tokens, width] with one token a row as in the clean run [1, tokens, width]."""
        states = states.clone()
        rows = torch.arange(len(states), device=states.device)
        states[rows, self.restored.to(states.device) - self.begin] = clean[0, self.restored.to(clean.device)]
        return states


class Tracer:
    """Traces prompts through one model."""

    def __init__(
        self,
        trunk: Trunk,
        sites: Sequence[Site],
        tokenizer: Any,
        start: tuple[int, ...],
        settings: TraceSettings | None = None,
        *,
        on_pass: Callable[[int, int], None] = lambda done, of: None,
        tokens_at_once: int | None = None,
    ) -> None:
        self.trunk, self.tokenizer, self.start = trunk, tokenizer, start
        self.settings = settings or TraceSettings()
        self.on_pass = on_pass
        self.tokens_at_once = tokens_at_once or (CPU_TOKENS if trunk.device.type == "cpu" else GPU_TOKENS)
        self.window = self.settings.window_of(len(trunk.blocks))
        self._parts: dict[str, list[nn.Module]] = {}
        if "mlp" in self.settings.kinds:  # the down projection's output, in every family what the stream gets
            self._parts["mlp"] = [module_at(trunk.model, site.name) for site in sites]
        if "attention" in self.settings.kinds:
            self._parts["attention"] = mixer_outputs(trunk.model, sites)

    @classmethod
    def of(cls, editor: Editor, settings: TraceSettings | None = None, **options: Any) -> Tracer:
        return cls(editor.trunk, editor.sites, editor.tokenizer, editor.loaded.start, settings, **options)

    @cached_property
    def embedding_std(self) -> float:
        """Standard deviation of all entries of the embedding table, as it leaves its module: some families scale it."""
        table = self.trunk.model.get_input_embeddings()
        count, width = table.weight.shape
        step = max(1, ENTRIES_AT_ONCE // width)
        sums = torch.zeros(2, dtype=torch.float64, device=table.weight.device)
        with torch.no_grad():
            for begin in range(0, count, step):
                rows = table(torch.arange(begin, min(count, begin + step), device=sums.device)).double()
                sums += torch.stack([rows.sum(), rows.square().sum()])
        mean, square = (sums / (count * width)).tolist()
        return float((square - mean**2) ** 0.5)

    @torch.no_grad()
    def trace(self, fact: Fact, *, own: bool = True, tokens: Sequence[int] | str | None = None) -> Trace:
        """Restore every state of a prompt in turn.

        Args:
            fact: the prompt and its subject.
            own: trace the model's own first choice; otherwise the first token of the fact's target.
            tokens: the tokens to restore, if not all; "subject" is the subject's last one.
        """
        begun = time.perf_counter()
        question, target = ask(fact, self.tokenizer, self.start, self.trunk.context)
        wanted = self._wanted(question, tokens)
        noise = self._noise(question)
        clean = self._run(question, None)
        corrupted = self._run(question, noise)
        said = torch.softmax(clean.logits[0], -1)
        answer = said.argmax() if own else torch.tensor(target, device=said.device)
        base = torch.softmax(corrupted.logits, -1)[:, answer].double().mean()
        back = self._restore_all(question, wanted, noise, clean, corrupted, answer)
        # All that was asked of the device, fetched at once: until here nothing waited for it.
        effects = {kind: self._effects(question, wanted, rows, base).cpu() for kind, rows in back.items()}
        odds = float(said[answer]), float(base)
        if not all(map(math.isfinite, odds)):
            raise NumericalError(
                f"the answer's probability is {odds[0]}, {odds[1]} corrupted (noise {self.settings.noise}), expected "
                f"numbers: take less noise, or load the model in a wider dtype"
            )
        return Trace(
            question=question,
            answer=str(self.tokenizer.decode([int(answer)])),
            answer_id=int(answer),
            first_choice=bool(answer == said.argmax()),
            clean=odds[0],
            corrupted=odds[1],
            effects=effects,
            settings=self.settings,
            noise=self.settings.noise * self.embedding_std,
            window=self.window,
            seconds=time.perf_counter() - begun,
        )

    def predicts(self, fact: Fact) -> tuple[int, int]:
        """(the model's first choice after the prompt, the first token of the fact's answer).

        The answer is what the model said before an edit (`old`) where the fact has it, else the target.
        """
        known = fact if fact.old is None else Fact(fact.prompt, fact.subject, fact.old)
        question, answer = ask(known, self.tokenizer, self.start, self.trunk.context)
        with torch.no_grad():
            return int(self._run(question, None, record=False).logits[0].argmax()), answer

    # Runs

    def _wanted(self, question: Question, tokens: Sequence[int] | str | None) -> list[int]:
        """The tokens to restore, those in front of the subject left out: there the two runs are the same."""
        if isinstance(tokens, str):
            if tokens != "subject":
                raise InputError(f"tokens are {tokens!r}, expected a list of places or 'subject': choose one of these")
            tokens = [question.subject[1]]
        if outside := [at for at in tokens or () if not 0 <= at < len(question.ids)]:
            raise InputError(f"tokens {outside} are not there, expected some of 0 to {len(question.ids) - 1}")
        listed = range(len(question.ids)) if tokens is None else sorted(set(tokens))
        return [at for at in listed if at >= question.subject[0]]

    def _noise(self, question: Question) -> Tensor:
        """[draws, tokens, width]: zero but at the subject. Drawn on the CPU, so that devices agree."""
        table = self.trunk.model.get_input_embeddings().weight
        first, last = question.subject
        generator = torch.Generator().manual_seed(self.settings.seed)
        drawn = torch.randn(self.settings.draws, last + 1 - first, table.shape[-1], generator=generator)
        noise = torch.zeros(self.settings.draws, len(question.ids), table.shape[-1], dtype=torch.float64)
        noise[:, first : last + 1] = self.settings.noise * self.embedding_std * drawn.double()
        return noise.to(table.device, table.dtype)

    def _run(self, question: Question, noise: Tensor | None, *, record: bool = True) -> _Run:
        """The whole prompt, once for each draw of noise."""
        rows = 1 if noise is None else len(noise)
        tokens = self._tokens(question, 0, len(question.ids), rows)
        hidden: list[Hidden] = []
        parts: dict[str, list[Hidden]] = {kind: [] for kind in self._parts}
        with ExitStack() as stack:
            stack.enter_context(_added(self.trunk.model.get_input_embeddings(), noise))
            if record:
                stack.enter_context(_recorded(self.trunk.blocks, hidden, tokens))
            if record and noise is None:
                for kind, modules in self._parts.items():
                    stack.enter_context(_recorded(modules, parts[kind], tokens))
            logits = self.trunk.logits(tokens, self._last(tokens))
        return _Run(hidden, parts, logits)

    def _restore_all(
        self, question: Question, wanted: list[int], noise: Tensor, clean: _Run, corrupted: _Run, answer: Tensor
    ) -> dict[str, list[list[Tensor]]]:
        """For each kind and group of tokens, each layer's probabilities [tokens, draws]."""
        groups = self._groups(question, wanted, noise)
        layers = range(len(self.trunk.blocks))
        total, done = len(self.settings.kinds) * len(layers) * len(wanted), 0
        back: dict[str, list[list[Tensor]]] = {kind: [] for kind in self.settings.kinds}
        for group in groups:
            count = len(group.restored) // len(noise)
            for kind, rows in back.items():
                rows.append([])
                for layer in layers:
                    logits = self._restored(kind, layer, group, noise, clean, corrupted)
                    # Not [:, answer]: an index in a tensor of no dimensions is waited for.
                    said = torch.softmax(logits, -1).index_select(-1, answer.view(1)).squeeze(-1)
                    rows[-1].append(said.double().unflatten(0, (count, len(noise))))
                    done += count
                    self.on_pass(done, total)
        return back

    def _groups(self, question: Question, wanted: list[int], noise: Tensor) -> Iterator[_Group]:
        """Tokens that are restored in one pass: more of them where little comes after."""
        left = list(wanted)
        while left:
            after = len(question.ids) - left[0]
            count = max(1, min(len(left), self.tokens_at_once // (after * len(noise))))
            yield self._group(question, left[:count], noise)
            left = left[count:]

    def _group(self, question: Question, restored: list[int], noise: Tensor) -> _Group:
        begin, draws, device = restored[0], len(noise), self.trunk.device
        with _added(self.trunk.model.get_input_embeddings(), noise[:, :begin]):
            cache = self.trunk.cache(self._tokens(question, 0, begin, draws))
        draw = torch.arange(draws, device=device).repeat(len(restored))
        tokens = self._tokens(question, begin, len(question.ids), len(draw))
        each = torch.tensor(restored, device=device).repeat_interleave(draws)
        return _Group(begin, tokens, select_cache(cache, draw), each, draw, self._last(tokens))

    def _restored(self, kind: str, layer: int, group: _Group, noise: Tensor, clean: _Run, corrupted: _Run) -> Tensor:
        """Logits [rows, vocabulary] with one state a row restored."""
        if kind == "hidden":
            states = group.with_restored(group.of(corrupted.hidden[layer]), clean.hidden[layer])
            return self.trunk.logits(group.tokens, group.where, cache=group.cache, start=(layer, states))
        first = max(0, layer - self.window // 2)
        last = min(len(self.trunk.blocks), layer + (self.window + 1) // 2)  # not included
        start = (first - 1, group.of(corrupted.hidden[first - 1])) if first else None
        with ExitStack() as stack:
            if start is None:
                stack.enter_context(_added(self.trunk.model.get_input_embeddings(), group.of(noise)))
            for at in range(first, last):
                stack.enter_context(_restoring(self._parts[kind][at], clean.parts[kind][at], group))
            return self.trunk.logits(group.tokens, group.where, cache=group.cache, start=start)

    def _effects(self, question: Question, wanted: list[int], groups: list[list[Tensor]], corrupted: Tensor) -> Tensor:
        """[tokens, layers]: means over the draws, less what there was without restoring."""
        depth = len(self.trunk.blocks)
        effects = torch.full((len(question.ids), depth), torch.nan, dtype=torch.float64, device=corrupted.device)
        effects[: question.subject[0]] = 0.0
        rows = [torch.stack([layer.mean(-1) for layer in layers], dim=-1) for layers in groups]  # [tokens, layers] each
        if rows:
            effects[torch.tensor(wanted, device=corrupted.device)] = torch.cat(rows) - corrupted
        return effects

    def _tokens(self, question: Question, begin: int, end: int, rows: int) -> Tokens:
        """The same tokens in every row, nothing padded."""
        device = self.trunk.device
        ids = torch.tensor(question.ids[begin:end], dtype=torch.long, device=device).expand(rows, -1)
        mask = torch.ones(rows, end, dtype=torch.long, device=device)
        return Tokens(ids, mask, torch.arange(begin, end, device=device).expand(rows, -1))

    def _last(self, tokens: Tokens) -> Tensor:
        rows, width = tokens.ids.shape
        last = torch.full((rows,), width - 1, device=self.trunk.device)
        return torch.stack([torch.arange(rows, device=self.trunk.device), last], dim=-1)


# Hooks


@contextmanager
def _added(module: nn.Module, noise: Tensor | None) -> Iterator[None]:
    """Noise on top of a module's output."""
    if noise is None:
        yield
        return
    handle = module.register_forward_hook(lambda _, __, out: out + noise.to(out))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _recorded(modules: Sequence[nn.Module], into: list[Hidden], tokens: Tokens) -> Iterator[None]:
    """What each module answers, [rows, tokens, width], in the order they are run."""

    def see(_: nn.Module, __: Any, out: Any) -> None:
        states = out[0] if isinstance(out, tuple) else out
        into.append(states.reshape(*tokens.ids.shape, -1))

    handles = [module.register_forward_hook(see) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _restoring(module: nn.Module, clean: Tensor, group: _Group) -> Iterator[None]:
    """One token of a module's output in each row as it was in the clean run."""

    def put(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        states = out.reshape(*group.tokens.ids.shape, -1)
        return group.with_restored(states, clean).reshape(out.shape)

    handle = module.register_forward_hook(put)
    try:
        yield
    finally:
        handle.remove()
