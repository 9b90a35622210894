"""Causal tracing: which hidden states carry a fact from its subject to the answer (ROME, section 2).

Three runs of one prompt:

- *clean*: the model gives the answer the probability P;
- *corrupted*: noise is added to the embeddings of the subject's tokens, and the probability falls to P*;
- *restored*: as before, but one state, at one token and one layer, is put back to its value in the clean run. The
  probability that comes back, P*(restored) − P*, is the *indirect effect* of that state.

A state is the output of a block (`hidden`), or what the MLP (`mlp`) or attention (`attention`) adds to it. The latter
two are restored over a window of layers, because the contribution of one layer alone hardly shows.

A plain loop makes one full pass for every token, layer, kind and draw of noise. Nearly all of that work is known
before it is done, and is left out here without changing the result:

- below the restored layer everything equals the corrupted run: a pass starts above it, from stored hidden states;
- before the restored token everything equals the corrupted run, at every layer: a pass runs only the tokens after it,
  on top of the keys and values of the corrupted run;
- before the subject nothing was corrupted, so restoring has no effect;
- the output head is applied to the last position only;
- all draws of noise, and as many tokens as pay off, go through the model together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rebind.analysis.attention_outputs import attention_outputs
from rebind.analysis.traces import PromptTokens, Trace, TraceSettings, read_prompt
from rebind.edit.facts.fact import Fact
from rebind.errors import InputError, NumericalError
from rebind.models.language_model import LanguageModel
from rebind.models.sites import module_at
from rebind.models.trunk import Hidden, Tokens, select_cache

CPU_TOKENS, GPU_TOKENS = 96, 16_384  # per pass: on a CPU just enough for efficient matrix products
EMBEDDINGS_AT_ONCE = 1 << 24  # entries of the embedding table

Hook = Callable[[nn.Module, Any, Any], Any]  # a forward hook: (module, inputs, output) → another output or None


@dataclass(frozen=True, eq=False)
class _Run:
    """What one run of the prompt produced."""

    hidden: list[Hidden]  # the output of each block
    parts: dict[str, list[Hidden]]  # what each MLP and each attention added
    logits: Tensor  # at the last position, [rows, vocabulary]


@dataclass(frozen=True, eq=False)
class _Group:
    """Restorations that go through the model together; rows are ordered by token, then by draw of noise."""

    begin: int  # the first token that is run; the cache holds those before it
    tokens: Tokens
    cache: Any
    restored: Tensor  # [rows]: the token restored in each row
    draw: Tensor  # [rows]: the draw of noise in each row

    def select(self, states: Tensor) -> Tensor:
        """Return the part of [draws, tokens, width], taken from the corrupted run, that belongs to each row."""
        return states[self.draw.to(states.device), self.begin :]

    def restore(self, states: Tensor, clean: Tensor) -> Tensor:
        """Return states [rows, tokens, width] with one token per row replaced from the clean run [1, tokens, width]."""
        states = states.clone()
        rows = torch.arange(len(states), device=states.device)
        states[rows, self.restored.to(states.device) - self.begin] = clean[0, self.restored.to(clean.device)]
        return states


class Tracer:
    """Traces prompts through one model.

    Args:
        model: the language model; prompts are traced without its chat template.
        settings: how to trace.
        on_progress: called with (states restored, states in all) during a trace.
        batch_tokens: tokens per pass; by default what suits the device.
    """

    def __init__(
        self,
        model: LanguageModel,
        settings: TraceSettings | None = None,
        *,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        batch_tokens: int | None = None,
    ) -> None:
        self.model, self.trunk = model.with_chat(False), model.trunk
        self.settings = settings or TraceSettings()
        self.on_progress = on_progress
        self.batch_tokens = batch_tokens or (CPU_TOKENS if self.trunk.device.type == "cpu" else GPU_TOKENS)
        self.window = self.settings.window_for(len(self.trunk.blocks))
        self._embeddings: Any = model.model.get_input_embeddings()
        self._parts: dict[str, list[nn.Module]] = {}
        if "mlp" in self.settings.kinds:  # in every family the residual stream gets the output of the down projection
            self._parts["mlp"] = [module_at(model.model, site.name) for site in model.sites]
        if "attention" in self.settings.kinds:
            self._parts["attention"] = attention_outputs(model.model, model.sites)

    @cached_property
    def embedding_std(self) -> float:
        """Standard deviation of all embeddings, as they leave their module: some families scale them there."""
        count, width = self._embeddings.weight.shape
        device = self._embeddings.weight.device
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        with torch.no_grad():
            for ids in torch.arange(count, device=device).split(max(1, EMBEDDINGS_AT_ONCE // width)):
                rows = self._embeddings(ids).double()
                sums += torch.stack([rows.sum(), rows.square().sum()])
        mean, square = (sums / (count * width)).tolist()
        return float((square - mean**2) ** 0.5)

    @torch.no_grad()
    def trace(
        self, fact: Fact, *, use_target: bool = False, tokens: Sequence[int] | Literal["subject"] | None = None
    ) -> Trace:
        """Trace the answer to a fact's prompt.

        Args:
            fact: the prompt, with its subject.
            use_target: trace the first token of the fact's target instead of the model's own first choice.
            tokens: the tokens to restore; None: all, "subject": the last one of the subject.
        """
        started = time.perf_counter()
        prompt, target = read_prompt(self.model, fact.as_prompt())
        chosen = self._tokens_to_restore(prompt, tokens)
        noise = self._noise(prompt)
        clean = self._run(prompt, None)
        corrupted = self._run(prompt, noise)
        probabilities = torch.softmax(clean.logits[0], -1)
        answer = torch.tensor(target, device=probabilities.device) if use_target else probabilities.argmax()
        baseline = torch.softmax(corrupted.logits, -1)[:, answer].double().mean()
        restored = self._restore_all(prompt, chosen, noise, clean, corrupted, answer)
        # Everything is fetched from the device here at once: until now nothing waited for it.
        effects = {kind: self._effects(prompt, chosen, rows, baseline).cpu() for kind, rows in restored.items()}
        clean_probability, corrupted_probability = float(probabilities[answer]), float(baseline)
        if not (math.isfinite(clean_probability) and math.isfinite(corrupted_probability)):
            raise NumericalError(
                f"The probability of the answer is {clean_probability}, and {corrupted_probability} with noise",
                expected="finite numbers",
                advice="Lower {noise}, or load the model in a wider dtype",
                settings={"noise": self.settings.noise},
                code="probability_not_finite",
            )
        return Trace(
            prompt=prompt,
            answer=str(self.model.tokenizer.decode([int(answer)])),
            answer_id=int(answer),
            first_choice=bool(answer == probabilities.argmax()),
            clean=clean_probability,
            corrupted=corrupted_probability,
            effects=effects,
            settings=self.settings,
            noise=self.settings.noise * self.embedding_std,
            window=self.window,
            seconds=time.perf_counter() - started,
        )

    @torch.no_grad()
    def knows(self, fact: Fact) -> bool:
        """Return whether the model's first choice after the prompt begins the fact's answer: `old`, else its target."""
        prompt, answer = read_prompt(self.model, fact.as_prompt(fact.old))
        return int(self._run(prompt, None).logits[0].argmax()) == answer

    # Runs

    def _tokens_to_restore(self, prompt: PromptTokens, tokens: Sequence[int] | str | None) -> list[int]:
        """Return the tokens to restore, without those before the subject, where both runs are equal."""
        if tokens is None:
            tokens = range(len(prompt.ids))
        elif tokens == "subject":
            tokens = [prompt.subject[1]]
        if isinstance(tokens, str) or not all(0 <= token < len(prompt.ids) for token in tokens):
            raise InputError(
                f"Tokens to restore are {tokens!r}",
                expected=f"some of 0 to {len(prompt.ids) - 1}, or 'subject'",
                code="unknown_tokens",
            )
        return [token for token in sorted(set(tokens)) if token >= prompt.subject[0]]

    def _noise(self, prompt: PromptTokens) -> Tensor:
        """Return noise [draws, tokens, width], zero outside the subject; drawn on the CPU, so that devices agree."""
        table = self._embeddings.weight
        first, last = prompt.subject
        generator = torch.Generator().manual_seed(self.settings.seed)
        drawn = torch.randn(self.settings.draws, last + 1 - first, table.shape[-1], generator=generator)
        noise = torch.zeros(self.settings.draws, len(prompt.ids), table.shape[-1], dtype=torch.float64)
        noise[:, first : last + 1] = self.settings.noise * self.embedding_std * drawn.double()
        return noise.to(table.device, table.dtype)

    def _run(self, prompt: PromptTokens, noise: Tensor | None) -> _Run:
        """Run the whole prompt, once for each draw of noise."""
        tokens = Tokens.left_padded([prompt.ids] * (1 if noise is None else len(noise)), self.trunk.device)
        hidden: list[Hidden] = []
        parts: dict[str, list[Hidden]] = {kind: [] for kind in self._parts}
        hooks = [(block, record_in(hidden, tokens)) for block in self.trunk.blocks]
        if noise is None:
            for kind, modules in self._parts.items():
                hooks += [(module, record_in(parts[kind], tokens)) for module in modules]
        else:
            hooks.append((self._embeddings, _add(noise)))
        with hooked(hooks):
            return _Run(hidden, parts, self.trunk.logits(tokens, _last_positions(tokens)))

    def _restore_all(
        self, prompt: PromptTokens, chosen: list[int], noise: Tensor, clean: _Run, corrupted: _Run, answer: Tensor
    ) -> dict[str, list[Tensor]]:
        """Return, for each kind and group of tokens, the mean probability [tokens, layers] over the draws of noise."""
        layers = range(len(self.trunk.blocks))
        total, done = len(self.settings.kinds) * len(layers) * len(chosen), 0
        restored: dict[str, list[Tensor]] = {kind: [] for kind in self.settings.kinds}
        for group in self._groups(prompt, chosen, noise):
            count = len(group.restored) // len(noise)
            for kind, groups in restored.items():
                columns = []
                for layer in layers:
                    logits = self._restore(kind, layer, group, noise, clean, corrupted)
                    # Not [:, answer]: indexing with a tensor without dimensions waits for the device.
                    probability = torch.softmax(logits, -1).index_select(-1, answer.view(1)).squeeze(-1)
                    columns.append(probability.double().unflatten(0, (count, len(noise))).mean(-1))
                    done += count
                    self.on_progress(done, total)
                groups.append(torch.stack(columns, dim=-1))
        return restored

    def _groups(self, prompt: PromptTokens, chosen: list[int], noise: Tensor) -> Iterator[_Group]:
        """Yield tokens that are restored in one pass: more of them where few tokens come after."""
        draws, device = len(noise), self.trunk.device
        while chosen:
            begin = chosen[0]
            count = max(1, min(len(chosen), self.batch_tokens // ((len(prompt.ids) - begin) * draws)))
            group, chosen = chosen[:count], chosen[count:]
            before = Tokens.left_padded([prompt.ids[:begin]] * draws, device)
            with hooked([(self._embeddings, _add(noise[:, :begin]))]):
                cache = self.trunk.cache(before)
            draw = torch.arange(draws, device=device).repeat(count)
            tokens = Tokens.following(before.select(draw), [prompt.ids[begin:]] * len(draw))
            restored = torch.tensor(group, device=device).repeat_interleave(draws)
            yield _Group(begin, tokens, select_cache(cache, draw), restored, draw)

    def _restore(self, kind: str, layer: int, group: _Group, noise: Tensor, clean: _Run, corrupted: _Run) -> Tensor:
        """Return logits [rows, vocabulary] with one state per row restored."""
        hooks: list[tuple[nn.Module, Hook]] = []
        if kind == "hidden":
            states = group.restore(group.select(corrupted.hidden[layer]), clean.hidden[layer])
            resume: tuple[int, Hidden] | None = (layer, states)
        else:
            first = max(0, layer - self.window // 2)
            end = min(len(self.trunk.blocks), layer + (self.window + 1) // 2)
            hooks = [(self._parts[kind][at], _restore_from(clean.parts[kind][at], group)) for at in range(first, end)]
            resume = (first - 1, group.select(corrupted.hidden[first - 1])) if first else None
            if not first:
                hooks.append((self._embeddings, _add(group.select(noise))))
        with hooked(hooks):
            where = _last_positions(group.tokens)
            return self.trunk.logits(group.tokens, where, cache=group.cache, resume=resume)

    def _effects(self, prompt: PromptTokens, chosen: list[int], restored: list[Tensor], corrupted: Tensor) -> Tensor:
        """Return [tokens, layers]: the probabilities with a state restored, less the one without."""
        depth = len(self.trunk.blocks)
        effects = torch.full((len(prompt.ids), depth), torch.nan, dtype=torch.float64, device=corrupted.device)
        effects[: prompt.subject[0]] = 0.0
        if chosen:
            effects[torch.tensor(chosen, device=corrupted.device)] = torch.cat(restored) - corrupted
        return effects


def _last_positions(tokens: Tokens) -> Tensor:
    """Return (row, last token) of each row, [rows, 2]."""
    rows, width = tokens.ids.shape
    last = torch.full((rows,), width - 1, device=tokens.ids.device)
    return torch.stack([torch.arange(rows, device=tokens.ids.device), last], dim=-1)


# Hooks


@contextmanager
def hooked(hooks: Sequence[tuple[nn.Module, Hook]]) -> Iterator[None]:
    """Register forward hooks, and remove them afterwards."""
    handles = [module.register_forward_hook(hook) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def record_in(outputs: list[Hidden], tokens: Tokens) -> Hook:
    """Return a hook that appends the output of a module, [rows, tokens, width]."""

    def record(_: nn.Module, __: Any, out: Any) -> None:
        states = out[0] if isinstance(out, tuple) else out
        outputs.append(states.reshape(*tokens.ids.shape, -1))

    return record


def _add(noise: Tensor) -> Hook:
    return lambda _, __, out: out + noise.to(out)


def _restore_from(clean: Tensor, group: _Group) -> Hook:
    def restore(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        return group.restore(out.reshape(*group.tokens.ids.shape, -1), clean).reshape(out.shape)

    return restore
