"""How a block adds the output of its down projection to the residual stream, and how to invert that.

Most blocks add the output y of the MLP to the residual stream r as it is, so the change to write is the change
that the stream needs. Others transform it first:

    r + y          Llama, GPT-2, Qwen, ...
    r + s·y        Granite
    r + s·N(y)     Gemma 2 and 3, OLMo 2 and 3, GLM 4, EXAONE 4     N an RMSNorm
    N(r + s·y)     OPT-350m                                         N a LayerNorm
    r + s(t)·y     shared experts of Qwen                           s a gate that depends on the token
    r + s(t)⊙y     RWKV, Zaya                                       a gate for every entry

`output_map` determines the form by probing: it replaces the output of the projection by two chosen vectors, and the
output of the block shows whether they were added, scaled or normalized. The norm is the module that receives the output
(or the sum), and probing shows what it computes. A scale that depends on the token is measured at the subjects.

A norm maps x ↦ κ·g⊙x + b with κ = 1/√(mean x² + ε) (a LayerNorm subtracts the mean of x first). However long x is, the
length of its output is bounded by g, so not every change can be reached. With the length ρ of x fixed, κ is a constant
of the row, and the output nearest to a target t is a least-squares problem on a sphere,

    min ‖κ·g⊙x + b − t‖   over ‖x‖ = ρ,

with the solution x = a⊙(t − b) / (a² + μ), a = κ·g, and the one μ > −min a² that gives x its length. If all of the
change is within reach, μ = 0 and x = (t − b)/a. If not, μ first gives up entries where g is small:
they cost the most length for the least output.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from rebind.errors import NumericalWarning
from rebind.models.tokens import Tokens
from rebind.models.trunk import Trunk

InputsOf = Callable[[nn.Module], Tensor]  # module → its input at each subject of the bare prompts, [n, width]

PROBE_TOKENS = ((0, 1, 2, 3), (0, 1, 2, 3))  # two equal rows: what differs in their outputs comes from the probe
MIN_REACHED = 0.5  # fraction of a change; below it there is a warning
MIN_SCALE = 0.1  # a gate smaller than this is not inverted further
MIN_SHARE = 0.1  # of the mean scale; smaller entries are given up
BISECTIONS = 100


@dataclass(frozen=True, eq=False)
class ScaleMap:
    """The output is added to the residual stream after multiplication by a number."""

    scale: float = 1.0

    def change(self, missing: Tensor, inputs_of: InputsOf) -> Tensor:
        """Return what to add to the output of the projection so that the stream gets `missing` [n, width]."""
        return missing if self.scale == 1.0 else missing / self.scale


@dataclass(frozen=True, eq=False)
class Norm:
    """x ↦ gain⊙x/rms(x) + shift, where a centered norm first subtracts the mean of x."""

    module: nn.Module
    gain: Tensor  # [width] float64
    shift: Tensor  # [width] float64
    centered: bool

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output of the module, in its own precision."""
        like = next(self.module.parameters(), x)
        return _apply_to_rows(self.module, x.to(like.device, like.dtype)).to(x)

    def nearest(self, x: Tensor, goal: Tensor) -> Tensor:
        """Return the x' as long as x (and with its mean, if centered) with the output nearest to `goal`."""
        gain, shift = self.gain.to(x), self.shift.to(x)
        mean = x.mean(-1, keepdim=True) if self.centered else torch.zeros_like(x[..., :1])
        x = x - mean
        scaled = gain * x
        output = self(x + mean) - shift
        kappa = (scaled * output).sum(-1, keepdim=True) / scaled.square().sum(-1, keepdim=True)  # includes ε
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return mean + _nearest_on_sphere(kappa * gain, goal - shift, length, self.centered)


@dataclass(frozen=True, eq=False)
class NormMap:
    """A norm stands between the output and the stream: r + scale·N(before·y + …), or N(r + before·y)."""

    norm: Norm
    scale: float = 1.0
    before: float = 1.0

    def change(self, missing: Tensor, inputs_of: InputsOf) -> Tensor:
        """Return the same as `ScaleMap.change`, or with a warning the nearest change that the norm can reach."""
        norm_input = inputs_of(self.norm.module).to(missing)
        goal = missing / self.scale
        norm_output = self.norm(norm_input)
        nearest = self.norm.nearest(norm_input, norm_output + goal)
        change = self.norm(nearest) - norm_output
        shares = (change * goal).sum(-1) / goal.square().sum(-1).clamp_min(torch.finfo(goal.dtype).tiny)
        if len(shares) and (median := float(shares.median())) < MIN_REACHED:
            warnings.warn(
                f"A {type(self.norm.module).__name__} behind the MLP bounds its output: only {median:.0%} of the "
                f"change needed at this layer is within reach (median of {len(shares)} facts). Edit more layers, or "
                f"lower the clamp.",
                NumericalWarning,
                stacklevel=3,
            )
        return (nearest - norm_input) / self.before


@dataclass(frozen=True, eq=False)
class GateMap:
    """The output, or that of a norm behind it, is scaled by a gate that depends on the token.

    The gate is one number per token, or one per entry. It is measured at the subjects, by running them again with
    `perturbation` added to the output.
    """

    module: ReferenceType[nn.Module]  # the projection, or the norm; weak, since maps are stored by projection
    above: ReferenceType[nn.Module]  # the next block, which receives the stream
    perturbation: Tensor  # [width], all entries of the same size
    norm: Norm | None = None
    by_entry: bool = False

    def change(self, missing: Tensor, inputs_of: InputsOf) -> Tensor:
        """Return the same as `ScaleMap.change`."""
        module, above = self.module(), self.above()
        assert module is not None
        assert above is not None
        before = inputs_of(above)
        with module.register_forward_hook(lambda _, __, out: out + self.perturbation.to(out)):
            response = inputs_of(above) - before
        scale = (response / self.perturbation.to(response)).to(missing)
        scale = scale if self.by_entry else scale.mean(-1, keepdim=True)
        floor = MIN_SHARE * scale.square().mean(-1, keepdim=True).sqrt().clamp_min(MIN_SCALE)
        change = missing * scale / scale.square().maximum(floor.square())
        return change if self.norm is None else NormMap(self.norm).change(change, inputs_of)


OutputMap = ScaleMap | NormMap | GateMap

_output_maps: WeakKeyDictionary[nn.Module, OutputMap] = (
    WeakKeyDictionary()
)  # by projection; edits do not change the map


def output_map(trunk: Trunk, layer: int, projection: nn.Module) -> OutputMap:
    """Return what block `layer` does with the output of its down projection; determined once, by two short runs."""
    if projection not in _output_maps:
        _output_maps[projection] = _find_output_map(trunk, layer, projection)
    return _output_maps[projection]


@torch.no_grad()
def _find_output_map(trunk: Trunk, layer: int, projection: nn.Module) -> OutputMap:
    probe = _Probe(trunk, layer, projection)
    first = probe.run(probe.random_rows())

    def gate_map(norm: Norm | None = None, *, by_entry: bool = False) -> GateMap:
        above = trunk.blocks[min(layer + 1, len(trunk.blocks) - 1)]
        module = norm.module if norm else projection
        return GateMap(ref(module), ref(above), probe.random_signs(), norm, by_entry)

    if (ratios := probe.ratios(first.inserted, first.output)) is not None:
        return ScaleMap(ratios[-1]) if probe.are_equal(ratios) else gate_map()
    norms = []
    for module, module_input, module_output in first.later:
        before = probe.ratio(first.inserted[:, -1], module_input[:, -1])
        norm = None if before is None else _as_norm(module, module_input[:, -1], probe.tolerance)
        if norm is None or before is None:
            continue
        norms += [norm] if before == 1.0 else []
        if (ratios := probe.ratios(module_output, first.output)) is not None:
            if probe.are_equal(ratios):
                return NormMap(norm, ratios[-1], before)
            if before == 1.0:
                return gate_map(norm)
    # Does every entry have a scale of its own? A second probe, at the last token only, shows it.
    second = probe.run(first.inserted[:, -1] * first.inserted.new_tensor([[1.0], [2.0]]), last_only=True)
    scales, again = (probe.step(run.output[:, -1]) / probe.step(run.inserted[:, -1]) for run in (first, second))
    if float((scales - again).norm()) <= probe.tolerance * float(scales.norm()):
        return gate_map(by_entry=True)
    warnings.warn(
        f"{type(trunk.blocks[layer]).__name__} {layer} transforms the output of its MLP by neither a scale nor a norm. "
        f"Edits are exact to first order only, so check the answers of the edited model.",
        NumericalWarning,
        stacklevel=4,
    )
    return gate_map(next(iter(norms), None))


@dataclass(frozen=True, eq=False)
class _ProbeRun:
    """A run of a block with two chosen outputs of its projection, one per row."""

    inserted: Tensor  # [2, tokens, width]: what replaced the output of the projection
    output: Tensor  # [2, tokens, width]: of the block
    later: list[tuple[nn.Module, Tensor, Tensor]]  # modules that ran after the projection, with input and output


class _Probe:
    """Replace the output of a projection by chosen vectors, and compare their difference with that of the block."""

    def __init__(self, trunk: Trunk, layer: int, projection: nn.Module) -> None:
        self.trunk, self.layer, self.projection = trunk, layer, projection
        self.tokens = Tokens.left_padded(PROBE_TOKENS, trunk.device)
        natural = trunk.after(layer, self.tokens)[:, -1]
        self.width, self.size = natural.shape[-1], float(natural.abs().median()) or 1.0
        # In some models a few entries are so large that their rounding errors would hide everything else.
        self.moderate = (natural.abs().amax(0) <= 16 * self.size).cpu()
        self.tolerance = max(1e-3, 8 * torch.finfo(natural.dtype).eps)
        self.generator = torch.Generator().manual_seed(0)

    def random_rows(self) -> Tensor:
        """Return two vectors of different lengths, [2, width]."""
        return self.size * torch.randn(2, self.width, generator=self.generator) * torch.tensor([[1.0], [3.0]])

    def random_signs(self) -> Tensor:
        """Return a vector [width] with entries of the same size."""
        return self.size * torch.randn(self.width, generator=self.generator).sign()

    def run(self, rows: Tensor, *, last_only: bool = False) -> _ProbeRun:
        """Run the block with the output of its projection replaced by `rows` [2, width], at all tokens or the last."""
        shape = (*self.tokens.ids.shape, self.width)
        inserted: list[Tensor] = []
        later: list[tuple[nn.Module, Tensor, Tensor]] = []

        def replace(_: nn.Module, __: Any, out: Tensor) -> Tensor:
            inserted.append(rows.to(out).unsqueeze(1).repeat(1, shape[1], 1))
            if last_only:
                inserted[0][:, :-1] = out.reshape(shape)[:, :-1]
            return inserted[0].reshape(out.shape).clone()

        def record(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            same = isinstance(out, Tensor) and args and getattr(args[0], "shape", None) == out.shape
            if inserted and same and out.numel() == inserted[0].numel() and out.shape[-1] == shape[-1]:
                later.append((module, args[0].reshape(shape), out.reshape(shape)))  # some MLPs flatten rows and tokens

        block = self.trunk.blocks[self.layer]
        with ExitStack() as hooks:
            hooks.enter_context(self.projection.register_forward_hook(replace))
            for module in block.modules():
                if module is not self.projection and module is not block:
                    hooks.enter_context(module.register_forward_hook(record))
            output = self.trunk.after(self.layer, self.tokens)
        return _ProbeRun(inserted[0], output, later)

    def step(self, pair: Tensor) -> Tensor:
        """Return the second row of a pair [2, width] minus the first, in the entries of moderate size."""
        return (pair[1].double() - pair[0].double()).cpu()[self.moderate]

    def ratio(self, pair: Tensor, output: Tensor) -> float | None:
        """Return the scale from a pair [2, width] to another, if there is one; exactly 1 if it is 1 up to rounding."""
        step, output_step = self.step(pair), self.step(output)
        scale = float(step @ output_step / step.square().sum())
        if not float((output_step - scale * step).norm()) <= self.tolerance * float(output_step.norm()):
            return None
        return 1.0 if abs(scale - 1) < self.tolerance / 4 else scale

    def ratios(self, pair: Tensor, output: Tensor) -> list[float] | None:
        """Return the scale from a pair [2, tokens, width] to another at each token, if all tokens have one."""
        by_token = [self.ratio(*rows) for rows in zip(pair.unbind(1), output.unbind(1), strict=True)]
        scales = [ratio for ratio in by_token if ratio is not None]
        return scales if len(scales) == len(by_token) else None

    def are_equal(self, ratios: Sequence[float]) -> bool:
        return max(ratios) - min(ratios) <= 4 * self.tolerance * abs(ratios[-1])


def _as_norm(module: nn.Module, example: Tensor, tolerance: float) -> Norm | None:
    """Return what a module computes, if it is a norm: judged by its outputs for vectors with known norms."""
    width, large = example.shape[-1], 64.0  # so large that ε does not matter
    signs = torch.ones(width)
    signs[1::2] = -1
    signs = (signs - signs.mean()) / signs.std(correction=0)
    noise = torch.randn(width, generator=torch.Generator().manual_seed(1))
    probes = (large * torch.stack([torch.ones(width), signs, noise])).to(example)
    try:
        outputs = _apply_to_rows(module, probes).double().cpu()
    except (RuntimeError, TypeError, ValueError):  # it takes other arguments or shapes: not a norm
        return None
    if outputs.shape != probes.shape:
        return None
    _, signs, noise = probes.double().cpu()
    for centered in (False, True):
        shift = outputs[0] if centered else torch.zeros_like(signs)
        gain = (outputs[1] - shift) * large / signs
        x = noise - noise.mean() if centered else noise
        expected = gain * x / x.square().mean().sqrt() + shift
        if float((outputs[2] - expected).norm()) <= 4 * tolerance * float(expected.norm()):
            return Norm(module, gain, shift, centered)
    return None


@torch.no_grad()
def _apply_to_rows(module: nn.Module, x: Tensor) -> Tensor:
    """Return the output of a module for rows [n, width], passed as sequences of one token."""
    output = module(x.unsqueeze(1))
    return output.squeeze(1) if isinstance(output, Tensor) and output.ndim == 3 else x.new_empty(0)


def _nearest_on_sphere(a: Tensor, t: Tensor, length: Tensor, centered: bool) -> Tensor:
    """Return the rows x with ‖x‖ = `length` (and mean 0, if centered) for which a⊙x is nearest to t."""
    square = a.square()

    def at(mu: Tensor) -> Tensor:
        weight = 1 / (square + mu).clamp_min(torch.finfo(t.dtype).tiny ** 0.5)
        x = a * t * weight
        return x - weight * (x.sum(-1, keepdim=True) / weight.sum(-1, keepdim=True)) if centered else x

    # ‖x‖ falls as μ rises: from infinity at −min a² to less than the length at the upper end.
    low = -square.amin(-1, keepdim=True)
    high = torch.linalg.vector_norm(a * t, dim=-1, keepdim=True) / length.clamp_min(torch.finfo(t.dtype).tiny)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        too_long = torch.linalg.vector_norm(at(middle), dim=-1, keepdim=True) > length
        low, high = torch.where(too_long, middle, low), torch.where(too_long, high, middle)
    x = at(high)
    return x * (length / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(torch.finfo(t.dtype).tiny))
