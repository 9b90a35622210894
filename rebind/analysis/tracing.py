"""Causal tracing: which hidden states carry a fact from its subject to the answer (ROME, section 2).

Three runs of one prompt:

- *clean*: the model gives the answer the probability P;
- *corrupted*: noise is added to the embeddings of the subject's tokens, and the probability falls to P*;
- *restored*: as corrupted, but one state, at one token and one layer, has its value from the clean run. The increase
  of the probability, P*(restored) − P*, is the *indirect effect* of that state.

A state is the output of a block (`hidden`), or what the MLP (`mlp`) or attention (`attention`) adds to it. The latter
two are restored over a window of layers, because the contribution of a single layer is small.

A plain loop would make one full pass for every token, layer, kind and draw of noise. Nearly all of that work is
redundant, and is left out here without changing the result:

- below the restored layer everything equals the corrupted run, so a pass starts above it, from stored hidden states;
- before the restored token everything equals the corrupted run, so a pass runs only the tokens after it, with the
  cached keys and values of the corrupted run;
- before the subject nothing was corrupted, so restoring has no effect;
- the output head is applied to the last position only;
- all draws of noise, and as many tokens as are efficient, go through the model together.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rebind.analysis.traces import PromptTokens, Trace, TraceSettings, read_prompt
from rebind.edit.facts.fact import Fact
from rebind.errors import InputError, NumericalError
from rebind.models.caches import select_cache
from rebind.models.language_model import LanguageModel
from rebind.models.sites import MIXER_CLASS, MIXER_NAME, Site, module_at
from rebind.models.tokens import Tokens
from rebind.models.trunk import Hidden, Trunk

CPU_TOKENS, GPU_TOKENS = 96, 16_384  # per pass: on a CPU just enough for efficient matrix products
EMBEDDING_ROWS = 4096  # rows of the embedding table per pass
OUTPUT_NAMES = {"o_proj", "c_proj", "out_proj", "dense", "Wo", "wo"}  # of the last linear map of attention

States = dict[str, list[Hidden]]  # kind → the state at each layer
Hook = Callable[[nn.Module, Any, Any], Any]  # a forward hook: (module, inputs, output) → another output or None


@dataclass(frozen=True, eq=False)
class _Group:
    """Restorations that go through the model together; rows are ordered by token, then by draw of noise."""

    begin: int  # the first token that is run; the cache holds those before it
    tokens: Tokens
    cache: Any
    restored: Tensor  # [rows]: the token restored in each row
    draw: Tensor  # [rows]: the draw of noise in each row
    noise: Tensor  # [rows, tokens, width]

    def select(self, states: Tensor) -> Tensor:
        """Return for each row its states from the corrupted run, given as [draws, tokens, width]."""
        return states[self.draw.to(states.device), self.begin :]

    def restore(self, states: Tensor, clean: Tensor) -> Tensor:
        """Return states [rows, tokens, width] with one token per row replaced from the clean run [1, tokens, width]."""
        states = states.clone()
        rows = torch.arange(len(states), device=states.device)
        states[rows, self.restored.to(states.device) - self.begin] = clean[0, self.restored.to(clean.device)]
        return states


class Tracer:
    """Run causal tracing on one model.

    Args:
        model: the language model; with `chat`, prompts are traced in its chat template.
        settings: what to restore, and the noise.
        on_progress: called with (states restored, number of states) during a trace.
        batch_tokens: tokens per pass; by default chosen for the device.
    """

    def __init__(
        self,
        model: LanguageModel,
        settings: TraceSettings | None = None,
        *,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        batch_tokens: int | None = None,
    ) -> None:
        self.model, self.trunk = model, model.trunk
        self.settings = settings or TraceSettings()
        self.on_progress = on_progress
        self.batch_tokens = batch_tokens or (CPU_TOKENS if self.trunk.device.type == "cpu" else GPU_TOKENS)
        self.window = self.settings.window_for(len(self.trunk.blocks))
        self._embeddings: Any = model.model.get_input_embeddings()
        self._modules = {"hidden": self.trunk.blocks}  # kind → the module at each layer that returns the state
        if "mlp" in self.settings.kinds:  # in every family the residual stream gets the output of the down projection
            self._modules["mlp"] = [module_at(model.model, site.name) for site in model.sites]
        if "attention" in self.settings.kinds:
            self._modules["attention"] = attention_outputs(model.model, model.sites)

    @cached_property
    @torch.no_grad()
    def embedding_std(self) -> float:
        """Standard deviation of the outputs of the embedding module, which some families scale."""
        table = self._embeddings.weight
        parts = torch.arange(len(table), device=table.device).split(EMBEDDING_ROWS)
        outputs = (self._embeddings(ids).double() for ids in parts)
        sums = sum(torch.stack([output.sum(), output.square().sum()]) for output in outputs)
        mean, square = (sums / table.numel()).tolist()
        return float((square - mean**2) ** 0.5)

    @torch.no_grad()
    def trace(self, fact: Fact, *, use_target: bool = False, subject_only: bool = False) -> Trace:
        """Trace the answer to a fact's prompt.

        Args:
            fact: the prompt, with its subject.
            use_target: trace the first token of the fact's target instead of the first choice of the model.
            subject_only: restore only states at the last token of the subject.
        """
        started = time.perf_counter()
        prompt, target = read_prompt(self.model, fact.as_prompt())
        noise = self._noise(prompt)
        clean, clean_logits = self._run(prompt, None)
        corrupted, corrupted_logits = self._run(prompt, noise)
        probabilities = torch.softmax(clean_logits[0], -1)
        answer = torch.tensor(target, device=probabilities.device) if use_target else probabilities.argmax()
        baseline = torch.softmax(corrupted_logits, -1)[:, answer].double().mean()
        first, last = prompt.mentions[0][0], prompt.subject[1]
        restored_tokens = [last] if subject_only else list(range(first, len(prompt.ids)))
        restored = self._restore_all(prompt, restored_tokens, noise, clean, corrupted, answer)
        # The results are copied from the device once, here: nothing waits for it before.
        effects = {kind: (rows - baseline).cpu() for kind, rows in restored.items()}
        for rows in effects.values():
            rows[:first] = 0.0  # before the subject both runs are equal
        without_noise, with_noise = float(probabilities[answer]), float(baseline)
        if not math.isfinite(without_noise + with_noise):
            raise NumericalError(
                f"The probability of the answer is {without_noise}, and {with_noise} with noise",
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
            clean=without_noise,
            corrupted=with_noise,
            effects=effects,
            settings=self.settings,
            noise=self.settings.noise * self.embedding_std,
            window=self.window,
            seconds=time.perf_counter() - started,
        )

    def knows(self, fact: Fact) -> bool:
        """Return whether the first choice of the model begins the true answer: `old`, or else the target."""
        return self.model.score([fact.as_prompt(fact.old)])[0].rank == 1

    def _noise(self, prompt: PromptTokens) -> Tensor:
        """Return noise [draws, tokens, width], zero outside the subject; the same on every device."""
        table = self._embeddings.weight
        generator = torch.Generator().manual_seed(self.settings.seed)
        noise = torch.zeros(self.settings.draws, len(prompt.ids), table.shape[-1], dtype=torch.float64)
        for first, last in prompt.mentions:
            draws = torch.randn(self.settings.draws, last + 1 - first, table.shape[-1], generator=generator)
            noise[:, first : last + 1] = self.settings.noise * self.embedding_std * draws.double()
        return noise.to(table.device, table.dtype)

    def _run(self, prompt: PromptTokens, noise: Tensor | None) -> tuple[States, Tensor]:
        """Run the prompt, once per draw of noise; return states and the logits of the last token [rows, vocabulary]."""
        tokens = Tokens.left_padded([prompt.ids] * (1 if noise is None else len(noise)), self.trunk.device)
        kinds = self._modules if noise is None else ("hidden",)
        states: States = {kind: [] for kind in kinds}
        hooks = [
            (module, record_in(states[kind], self.trunk, tokens)) for kind in kinds for module in self._modules[kind]
        ]
        if noise is not None:
            hooks.append((self._embeddings, _add(noise)))
        with hooked(hooks):
            return states, self.trunk.logits(tokens, _last_positions(tokens))

    def _restore_all(
        self,
        prompt: PromptTokens,
        restored_tokens: list[int],
        noise: Tensor,
        clean: States,
        corrupted: States,
        answer: Tensor,
    ) -> dict[str, Tensor]:
        """Return for each kind the mean probability with one state restored, [tokens, layers]; NaN for other tokens."""
        depth = len(self.trunk.blocks)
        nothing = torch.full((len(prompt.ids), depth), torch.nan, dtype=torch.float64, device=answer.device)
        restored = {kind: nothing.clone() for kind in self.settings.kinds}
        total, done = len(restored) * depth * len(restored_tokens), 0
        for group in self._groups(prompt, restored_tokens, noise):
            tokens = group.restored[:: len(noise)].to(answer.device)
            for kind, layer in itertools.product(restored, range(depth)):
                logits = self._restore(kind, layer, group, clean, corrupted)
                # Indexing with [:, answer] would wait for the device.
                probability = torch.softmax(logits, -1).index_select(-1, answer.view(1))
                restored[kind][tokens, layer] = probability.double().view(len(tokens), -1).mean(-1)
                done += len(tokens)
                self.on_progress(done, total)
        return restored

    def _groups(self, prompt: PromptTokens, restored_tokens: list[int], noise: Tensor) -> Iterator[_Group]:
        """Yield groups of tokens that are restored in one pass: more tokens per group toward the end of the prompt."""
        draws, device = len(noise), self.trunk.device
        while restored_tokens:
            begin = restored_tokens[0] if self.trunk.shares_prefixes else 0
            count = max(1, min(len(restored_tokens), self.batch_tokens // ((len(prompt.ids) - begin) * draws)))
            group, restored_tokens = restored_tokens[:count], restored_tokens[count:]
            before = Tokens.left_padded([prompt.ids[:begin]] * draws, device)
            with hooked([(self._embeddings, _add(noise[:, :begin]))]):
                cache = self.trunk.cache(before)
            draw = torch.arange(draws, device=device).repeat(count)
            tokens = Tokens.following(before.select(draw), [prompt.ids[begin:]] * len(draw))
            restored = torch.tensor(group, device=device).repeat_interleave(draws)
            yield _Group(begin, tokens, select_cache(cache, draw), restored, draw, noise[draw, begin:])

    def _restore(self, kind: str, layer: int, group: _Group, clean: States, corrupted: States) -> Tensor:
        """Return logits [rows, vocabulary] with one state per row restored."""
        hooks: list[tuple[nn.Module, Hook]] = []
        resume: tuple[int, Hidden] | None = None
        if kind == "hidden":
            resume = (layer, group.restore(group.select(corrupted["hidden"][layer]), clean["hidden"][layer]))
        else:
            first = max(0, layer - self.window // 2)
            end = min(len(self.trunk.blocks), layer + (self.window + 1) // 2)
            hooks = [(self._modules[kind][i], _restore_from(clean[kind][i], group)) for i in range(first, end)]
            if first:
                resume = (first - 1, group.select(corrupted["hidden"][first - 1]))
            else:
                hooks.append((self._embeddings, _add(group.noise)))
        with hooked(hooks):
            return self.trunk.logits(group.tokens, _last_positions(group.tokens), cache=group.cache, resume=resume)


def attention_outputs(model: nn.Module, sites: Sequence[Site]) -> list[nn.Module]:
    """Return the last linear map of the attention (or other token mixer) of each layer, in order.

    The output of that map is what attention adds to a token. The module around it is no substitute: in BLOOM it also
    adds the residual stream, and in other families it returns a tuple.
    """
    outputs = []
    for site in sites:
        mixers: list[str] = []
        maps: list[tuple[str, nn.Module]] = []
        for path, module in module_at(model, site.block).named_modules():
            name = path.rpartition(".")[2]
            if path and (MIXER_NAME.search(name) or MIXER_CLASS.search(type(module).__name__)):
                mixers.append(f"{path}.")
            width = module.weight.shape[-1] if isinstance(module, Conv1D) else getattr(module, "out_features", None)
            if width == site.d_v and f"{path}.".startswith(tuple(mixers)):
                maps.append((name, module))
        if not maps:
            raise InputError(
                f"{site.block} has no attention that ends in a linear map to width {site.d_v}",
                advice="Trace hidden states or MLPs only, with {kind}",
                settings={"kind": "mlp"},
                code="no_attention_output",
            )
        named = [module for name, module in maps if name in OUTPUT_NAMES]
        outputs.append(named[-1] if named else maps[-1][1])
    return outputs


def _last_positions(tokens: Tokens) -> Tensor:
    """Return (row, last token) of each row, [rows, 2]."""
    rows = torch.arange(len(tokens.ids), device=tokens.ids.device)
    return torch.stack([rows, torch.full_like(rows, tokens.ids.shape[1] - 1)], dim=-1)


@contextmanager
def hooked(hooks: Sequence[tuple[nn.Module, Hook]]) -> Iterator[None]:
    """Register forward hooks, and remove them afterwards."""
    with ExitStack() as handles:
        for module, hook in hooks:
            handles.enter_context(module.register_forward_hook(hook))
        yield


def record_in(outputs: list[Hidden], trunk: Trunk, tokens: Tokens) -> Hook:
    """Return a hook that appends the output [rows, tokens, width] of a module to a list."""
    return lambda _, __, out: outputs.append(trunk.states_in(out, tokens))


def _add(noise: Tensor) -> Hook:
    return lambda _, __, out: out + noise.to(out)


def _restore_from(clean: Tensor, group: _Group) -> Hook:
    shape = (*group.tokens.ids.shape, -1)
    return lambda _, __, out: group.restore(out.reshape(shape), clean).reshape(out.shape)
