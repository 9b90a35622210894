"""What a down projection must answer for the residual stream to get what it should.

Most blocks add the MLP's output y to the residual stream as it is, and a change wanted in the stream is the
change to write. Others do something to it first:

    r + y          Llama, GPT-2, Qwen, …
    r + s·y        Granite
    r + s·N(y)     Gemma 2 and 3, OLMo 2 and 3, GLM 4, EXAONE 4     N an RMSNorm
    N(r + s·y)     OPT-350m                                         N a LayerNorm

Which of them a block is, is found by structure: the projection's output is replaced by two chosen vectors, and
what the block answers tells a sum from a scale from a norm. The norm is the module that is handed the output
(or the sum), and what it does is found by asking it.

A norm answers x ↦ κ·g⊙x + b, κ = 1/√(mean x² + ε) (a LayerNorm subtracts the mean of x first). However long x is,
the answer is as long as g allows, so not every change can be had. With the length ρ of x kept, κ is a constant of
the row, and the nearest answer to a wanted t is a least-squares problem on a sphere,

    min ‖κ·g⊙x + b − t‖   over ‖x‖ = ρ,

whose solution is x = a⊙(t − b) / (a² + μ), a = κ·g, with the one μ > −min a² that gives x its length. Where all of
the wanted change is within reach, μ = 0 and x = (t − b)/a. Where it is not, μ gives up first the entries where g is
small, which would take most length for least answer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rebind.errors import NumericalWarning
from rebind.models.trunk import Tokens, Trunk

Read = Callable[[nn.Module], Tensor]  # what enters a module at each subject of the bare prompts, [n, width]

PROBE = ((0, 1, 2, 3), (0, 1, 2, 3))  # two rows alike: what differs between their answers is our doing
LITTLE = 0.5  # of a wanted change: less within reach than this is said aloud
HALVINGS = 100


@dataclass(frozen=True, eq=False)
class Summed:
    """The output is added to the residual stream, times a number."""

    scale: float = 1.0

    def change(self, missing: Tensor, read: Read) -> Tensor:
        """What to add to the projection's output for the stream to get `missing` [n, width]."""
        return missing if self.scale == 1.0 else missing / self.scale


@dataclass(frozen=True, eq=False)
class Norm:
    """x ↦ gain⊙x/rms(x) + shift, x less its mean first where `centred`."""

    module: nn.Module
    gain: Tensor  # [width] float64, as is all that follows
    shift: Tensor  # [width]
    centred: bool

    def __call__(self, x: Tensor) -> Tensor:
        """The module's own answer, in its own precision."""
        like = next(self.module.parameters(), x)
        return _asked(self.module, x.to(like.device, like.dtype)).to(x)

    def nearest(self, x: Tensor, wanted: Tensor) -> Tensor:
        """The x' as long as x whose answer is nearest to `wanted`; of a centred norm, with the mean of x."""
        gain, shift = self.gain.to(x), self.shift.to(x)
        middle = x.mean(-1, keepdim=True) if self.centred else torch.zeros_like(x[..., :1])
        x = x - middle
        plain = gain * x
        answer = self(x + middle) - shift
        kappa = (plain * answer).sum(-1, keepdim=True) / plain.square().sum(-1, keepdim=True)  # ε is in it
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return middle + _on_sphere(kappa * gain, wanted - shift, length, self.centred)


@dataclass(frozen=True, eq=False)
class Normalised:
    """A norm stands between the output and the stream: in front of the sum, or behind it."""

    norm: Norm
    scale: float = 1.0
    behind: bool = False

    def change(self, missing: Tensor, read: Read) -> Tensor:
        """As `Summed.change`; of what is out of reach, the nearest."""
        before = read(self.norm.module).to(missing)
        wanted = missing if self.behind else missing / self.scale
        now = self.norm(before)
        after = self.norm.nearest(before, now + wanted)
        self._say_what_is_out_of_reach(self.norm(after) - now, wanted)
        return (after - before) / (self.scale if self.behind else 1.0)

    def _say_what_is_out_of_reach(self, got: Tensor, wanted: Tensor) -> None:
        reached = (got * wanted).sum(-1) / wanted.square().sum(-1).clamp_min(torch.finfo(wanted.dtype).tiny)
        middle = float(reached.median()) if len(reached) else 1.0
        if middle < LITTLE:
            warnings.warn(
                f"a {type(self.norm.module).__name__} behind the MLP bounds what it adds: {middle:.0%} of the change "
                f"wanted at this layer is within reach (median of {len(reached)} facts), expected most of it: edit "
                f"more layers, or lower the clamp",
                NumericalWarning,
                stacklevel=4,
            )


Added = Summed | Normalised

_known: WeakKeyDictionary[nn.Module, Added] = WeakKeyDictionary()  # by projection; edits do not change what follows it


def how_added(trunk: Trunk, layer: int, module: nn.Module) -> Added:
    """What the block does with the output of its down projection `module`; found once, by two short runs."""
    if module not in _known:
        _known[module] = _find(trunk, layer, module)
    return _known[module]


@torch.no_grad()
def _find(trunk: Trunk, layer: int, module: nn.Module) -> Added:
    run = _Probe(trunk, layer, module)
    size = float(run.natural.abs().median()) or 1.0
    # Some models keep a few entries so large that their rounding would drown everything beside them.
    calm = (run.natural.abs().amax(0) <= 16 * size).cpu()
    noise = torch.randn(2, run.natural.shape[-1], generator=torch.Generator().manual_seed(0))
    seen = run.with_output(size * noise * torch.tensor([[1.0], [3.0]]))
    near = max(1e-3, 8 * torch.finfo(run.natural.dtype).eps)
    given, got = _step(seen.given, calm), _step(seen.answer, calm)
    if (scale := _ratio(given, got, near)) is not None:
        return Summed(scale)
    for candidate, entered, left in seen.passed:
        norm = _norm(candidate, entered, near)
        if norm is None:
            continue
        if torch.equal(entered, seen.given) and (scale := _ratio(_step(left, calm), got, near)) is not None:
            return Normalised(norm, scale)
        if torch.equal(left, seen.answer) and (scale := _ratio(given, _step(entered, calm), near)) is not None:
            return Normalised(norm, scale, behind=True)
    warnings.warn(
        f"{type(trunk.blocks[layer]).__name__} {layer} does something to its MLP's output that is neither a scale nor "
        f"a norm, expected one of them: it is written as if it were added as it is, so check what the model says",
        NumericalWarning,
        stacklevel=4,
    )
    return Summed()


@dataclass(frozen=True, eq=False)
class _Seen:
    given: Tensor  # [2, width]: the outputs that were put in
    answer: Tensor  # [2, width]: what the block made of them
    passed: list[tuple[nn.Module, Tensor, Tensor]]  # modules that ran after: what entered, what left


class _Probe:
    """Runs of two rows of a few tokens through a block; the last token is looked at."""

    def __init__(self, trunk: Trunk, layer: int, module: nn.Module) -> None:
        self.trunk, self.layer, self.module = trunk, layer, module
        self.tokens = Tokens.left_padded(PROBE, trunk.device)
        self.natural = trunk.after(layer, self.tokens)[:, -1]

    def with_output(self, rows: Tensor) -> _Seen:
        given: list[Tensor] = []
        passed: list[tuple[nn.Module, Tensor, Tensor]] = []

        def replace(_: nn.Module, __: Any, out: Tensor) -> Tensor:
            given.append(rows.to(out))
            put = given[0].unsqueeze(1).expand(-1, len(PROBE[0]), -1)  # the same at every token
            return put.reshape(out.shape).clone()

        def watch(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            if given and args and isinstance(args[0], Tensor) and isinstance(out, Tensor):
                entered, left = (_last(tensor, len(rows)) for tensor in (args[0], out))
                if entered.shape == left.shape == rows.shape:
                    passed.append((module, entered, left))

        others = [inner for inner in self.trunk.blocks[self.layer].modules() if inner is not self.module]
        handles = [self.module.register_forward_hook(replace), *(m.register_forward_hook(watch) for m in others[1:])]
        try:
            answer = self.trunk.after(self.layer, self.tokens)[:, -1]
        finally:
            for handle in handles:
                handle.remove()
        return _Seen(given[0], answer, passed)


def _last(tensor: Tensor, rows: int) -> Tensor:
    """The last token of each row; some MLPs flatten rows and tokens."""
    return tensor.reshape(rows, -1, tensor.shape[-1])[:, -1] if tensor.ndim >= 2 else tensor


def _step(pair: Tensor, calm: Tensor) -> Tensor:
    """From the first row to the second, in the calm entries."""
    return (pair[1].double() - pair[0].double()).cpu()[calm]


def _ratio(given: Tensor, got: Tensor, near: float) -> float | None:
    """The number s with got = s·given, if there is one; 1 when it is that up to rounding."""
    scale = float(given @ got / given.square().sum())
    if not float((got - scale * given).norm()) <= near * float(got.norm()):
        return None
    return 1.0 if abs(scale - 1) < near / 4 else scale


def _norm(module: nn.Module, like: Tensor, near: float) -> Norm | None:
    """What a module does, if it is a norm: learnt from its answers to vectors whose norms are known."""
    width = like.shape[-1]
    large = 64.0  # beside which no ε is seen
    flat = large * torch.ones(width)
    signs = torch.ones(width)
    signs[1::2] = -1
    signs = large * (signs - signs.mean()) / signs.std(correction=0)
    noise = large * torch.randn(width, generator=torch.Generator().manual_seed(1))
    probes = torch.stack([flat, signs, noise]).to(like)
    try:
        answers = _asked(module, probes).double().cpu()
    except (RuntimeError, TypeError, ValueError):  # wants other arguments, or another shape: not a norm
        return None
    if answers.shape != probes.shape:
        return None
    flat, signs, noise = probes.double().cpu()
    for centred in (False, True):
        shift = answers[0] if centred else torch.zeros_like(flat)
        gain = (answers[1] - shift) * large / signs
        x = noise - noise.mean() if centred else noise
        expected = gain * x / x.square().mean().sqrt() + shift
        if float((answers[2] - expected).norm()) <= 4 * near * float(expected.norm()):
            return Norm(module, gain, shift, centred)
    return None


@torch.no_grad()
def _asked(module: nn.Module, x: Tensor) -> Tensor:
    """The module's answer to rows [n, width], handed over as one token each."""
    answer = module(x.unsqueeze(1))
    return answer.squeeze(1) if isinstance(answer, Tensor) and answer.ndim == 3 else x.new_empty(0)


def _on_sphere(a: Tensor, t: Tensor, length: Tensor, centred: bool) -> Tensor:
    """Rows x of the given length, of mean 0 where `centred`, that bring a⊙x nearest to t."""
    square = a.square()

    def at(mu: Tensor) -> Tensor:
        weight = 1 / (square + mu).clamp_min(torch.finfo(t.dtype).tiny ** 0.5)
        x = a * t * weight
        return x - weight * (x.sum(-1, keepdim=True) / weight.sum(-1, keepdim=True)) if centred else x

    # ‖x‖ falls as μ rises: from beyond all bounds at −min a² to less than the length at the upper end.
    low = -square.amin(-1, keepdim=True)
    high = torch.linalg.vector_norm(a * t, dim=-1, keepdim=True) / length.clamp_min(torch.finfo(t.dtype).tiny)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        long = torch.linalg.vector_norm(at(middle), dim=-1, keepdim=True) > length
        low, high = torch.where(long, middle, low), torch.where(long, high, middle)
    x = at(high)
    return x * (length / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(torch.finfo(t.dtype).tiny))
