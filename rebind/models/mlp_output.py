"""What a block does with the output of its down projection, and how to invert it.

Most blocks add the output y of the MLP to the residual stream r as it is, so a change wanted in the stream is the
change to write. Others transform it first:

    r + y          Llama, GPT-2, Qwen, ...
    r + s·y        Granite
    r + s·N(y)     Gemma 2 and 3, OLMo 2 and 3, GLM 4, EXAONE 4     N an RMSNorm
    N(r + s·y)     OPT-350m                                         N a LayerNorm
    r + s(t)·y     shared experts of Qwen                           s a gate that depends on the token
    r + s(t)⊙y     RWKV, Zaya                                       a gate for every entry

`output_map` finds out by probing: it replaces the output of the projection by two chosen vectors, and the output of
the block tells a sum from a scale from a norm. The norm is the module that receives the output (or the sum), and
probing shows what it computes. A scale that depends on the token is measured at the subjects themselves.

A norm maps x ↦ κ·g⊙x + b with κ = 1/√(mean x² + ε) (a LayerNorm subtracts the mean of x first). However long x is, the
length of its output is bounded by g, so not every change can be reached. With the length ρ of x fixed, κ is a constant
of the row, and the output nearest to a wanted t is a least-squares problem on a sphere,

    min ‖κ·g⊙x + b − t‖   over ‖x‖ = ρ,

with the solution x = a⊙(t − b) / (a² + μ), a = κ·g, and the one μ > −min a² that gives x its length. Where all of the
wanted change is within reach, μ = 0 and x = (t − b)/a. Where it is not, μ gives up first the entries where g is small,
which would take most of the length for the least output.
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
LEAST_REACHED = 0.5  # of a wanted change: less than this is worth a warning
LEAST_SCALE = 0.1  # what a gate scales by less is not amplified further
LEAST_SHARE = 0.1  # of the mean of the scales: entries with less are given up
BISECTIONS = 100


@dataclass(frozen=True, eq=False)
class Scaled:
    """The output is added to the residual stream, times a number."""

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

    def nearest(self, x: Tensor, wanted: Tensor) -> Tensor:
        """Return the x' as long as x (and with its mean, if centered) with the output nearest to `wanted`."""
        gain, shift = self.gain.to(x), self.shift.to(x)
        mean = x.mean(-1, keepdim=True) if self.centered else torch.zeros_like(x[..., :1])
        x = x - mean
        scaled = gain * x
        output = self(x + mean) - shift
        kappa = (scaled * output).sum(-1, keepdim=True) / scaled.square().sum(-1, keepdim=True)  # includes ε
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return mean + _nearest_on_sphere(kappa * gain, wanted - shift, length, self.centered)


@dataclass(frozen=True, eq=False)
class Normalized:
    """A norm stands between the output and the stream: r + scale·N(before·y + …), or N(r + before·y)."""

    norm: Norm
    scale: float = 1.0
    before: float = 1.0

    def change(self, missing: Tensor, inputs_of: InputsOf) -> Tensor:
        """Return the same as `Scaled.change`; for what is out of reach, the nearest, with a warning."""
        entered = inputs_of(self.norm.module).to(missing)
        wanted = missing / self.scale
        now = self.norm(entered)
        nearest = self.norm.nearest(entered, now + wanted)
        change = self.norm(nearest) - now
        reached = (change * wanted).sum(-1) / wanted.square().sum(-1).clamp_min(torch.finfo(wanted.dtype).tiny)
        if len(reached) and (median := float(reached.median())) < LEAST_REACHED:
            warnings.warn(
                f"A {type(self.norm.module).__name__} behind the MLP bounds what it adds: {median:.0%} of the change "
                f"wanted at this layer is within reach (median of {len(reached)} facts). Edit more layers, or lower "
                f"the clamp.",
                NumericalWarning,
                stacklevel=3,
            )
        return (nearest - entered) / self.before


@dataclass(frozen=True, eq=False)
class Measured:
    """The output, or that of a norm behind it, is scaled by numbers that depend on the token.

    There is one for all entries, or one for each. They are measured at the subjects, by running these again with `push`
    added to the output.
    """

    module: ReferenceType[nn.Module]  # the projection, or the norm; weak, since maps are stored by projection
    above: ReferenceType[nn.Module]  # the next block, which receives the stream
    push: Tensor  # [width], all entries of the same size
    norm: Norm | None = None
    by_entry: bool = False

    def change(self, missing: Tensor, inputs_of: InputsOf) -> Tensor:
        """Return the same as `Scaled.change`."""
        module, above = self.module(), self.above()
        assert module is not None
        assert above is not None
        before = inputs_of(above)
        with module.register_forward_hook(lambda _, __, out: out + self.push.to(out)):
            response = inputs_of(above) - before
        scale = (response / self.push.to(response)).to(missing)
        scale = scale if self.by_entry else scale.mean(-1, keepdim=True)
        least = LEAST_SHARE * scale.square().mean(-1, keepdim=True).sqrt().clamp_min(LEAST_SCALE)
        wanted = missing * scale / scale.square().maximum(least.square())
        return wanted if self.norm is None else Normalized(self.norm).change(wanted, inputs_of)


OutputMap = Scaled | Normalized | Measured

_known: WeakKeyDictionary[nn.Module, OutputMap] = WeakKeyDictionary()  # by projection; edits do not change the map


def output_map(trunk: Trunk, layer: int, projection: nn.Module) -> OutputMap:
    """Return what block `layer` does with the output of its down projection; found once, by two short runs."""
    if projection not in _known:
        _known[projection] = _find_output_map(trunk, layer, projection)
    return _known[projection]


@torch.no_grad()
def _find_output_map(trunk: Trunk, layer: int, projection: nn.Module) -> OutputMap:
    tokens = Tokens.left_padded(PROBE_TOKENS, trunk.device)
    natural = trunk.after(layer, tokens)[:, -1]
    size = float(natural.abs().median()) or 1.0
    # Some models have a few entries so large that their rounding errors would hide everything else.
    moderate = (natural.abs().amax(0) <= 16 * size).cpu()
    generator = torch.Generator().manual_seed(0)
    rows = size * torch.randn(2, natural.shape[-1], generator=generator) * torch.tensor([[1.0], [3.0]])
    put_in, output, passed = _run_with_output(trunk, layer, projection, tokens, rows)
    tolerance = max(1e-3, 8 * torch.finfo(natural.dtype).eps)

    def scales(pair: Tensor) -> list[float] | None:
        """Return the scale from a pair [2, tokens, width] to the output of the block, per token, if there is one."""
        ratios = [
            _ratio(_difference(entered, moderate), _difference(left, moderate), tolerance)
            for entered, left in zip(pair.unbind(1), output.unbind(1), strict=True)
        ]
        found = [ratio for ratio in ratios if ratio is not None]
        return found if len(found) == len(ratios) else None

    def measured(norm: Norm | None = None, *, by_entry: bool = False) -> Measured:
        above = trunk.blocks[min(layer + 1, len(trunk.blocks) - 1)]
        push = size * torch.randn(natural.shape[-1], generator=generator).sign()
        return Measured(ref(norm.module if norm else projection), ref(above), push, norm, by_entry)

    if (ratios := scales(put_in)) is not None:
        return Scaled(ratios[-1]) if _equal(ratios, tolerance) else measured()
    norms = []
    for module, entered, left in passed:
        before = _ratio(_difference(put_in[:, -1], moderate), _difference(entered[:, -1], moderate), tolerance)
        norm = None if before is None else _as_norm(module, entered[:, -1], tolerance)
        if norm is None or before is None:
            continue
        norms += [norm] if before == 1.0 else []
        if (ratios := scales(left)) is not None and (before == 1.0 or _equal(ratios, tolerance)):
            return Normalized(norm, ratios[-1], before) if _equal(ratios, tolerance) else measured(norm)
    if _scales_entries(trunk, layer, projection, tokens, put_in, output, moderate, tolerance):
        return measured(by_entry=True)
    warnings.warn(
        f"{type(trunk.blocks[layer]).__name__} {layer} transforms the output of its MLP by neither a scale nor a norm. "
        f"Edits follow it to first order only, so check what the edited model says.",
        NumericalWarning,
        stacklevel=4,
    )
    return measured(next(iter(norms), None))


def _scales_entries(
    trunk: Trunk,
    layer: int,
    projection: nn.Module,
    tokens: Tokens,
    put_in: Tensor,
    output: Tensor,
    moderate: Tensor,
    tolerance: float,
) -> bool:
    """Return whether every entry of the output is scaled by itself: another output at the last token alone tells."""
    other = put_in[:, -1] * put_in.new_tensor([[1.0], [2.0]])
    other_in, other_out, _ = _run_with_output(trunk, layer, projection, tokens, other, last_only=True)
    scales = [
        _difference(left[:, -1], moderate) / _difference(entered[:, -1], moderate)
        for entered, left in ((put_in, output), (other_in, other_out))
    ]
    return float((scales[0] - scales[1]).norm()) <= tolerance * float(scales[0].norm())


def _equal(ratios: Sequence[float], tolerance: float) -> bool:
    return max(ratios) - min(ratios) <= 4 * tolerance * abs(ratios[-1])


def _run_with_output(
    trunk: Trunk, layer: int, projection: nn.Module, tokens: Tokens, rows: Tensor, *, last_only: bool = False
) -> tuple[Tensor, Tensor, list[tuple[nn.Module, Tensor, Tensor]]]:
    """Run a block with the output of its projection replaced by `rows` [2, width], at every token or the last one.

    Returns the output as it was put in [2, tokens, width], the output of the block, and the modules that ran after the
    projection with their inputs and outputs.
    """
    shape = (*tokens.ids.shape, rows.shape[-1])
    put_in: list[Tensor] = []
    passed: list[tuple[nn.Module, Tensor, Tensor]] = []

    def replace(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        put_in.append(rows.to(out).unsqueeze(1).repeat(1, shape[1], 1))
        if last_only:
            put_in[0][:, :-1] = out.reshape(shape)[:, :-1]
        return put_in[0].reshape(out.shape).clone()

    def record(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        same = isinstance(out, Tensor) and args and getattr(args[0], "shape", None) == out.shape
        if put_in and same and out.numel() == put_in[0].numel() and out.shape[-1] == shape[-1]:
            passed.append((module, args[0].reshape(shape), out.reshape(shape)))  # some MLPs flatten rows and tokens

    block = trunk.blocks[layer]
    with ExitStack() as hooks:
        hooks.enter_context(projection.register_forward_hook(replace))
        for module in block.modules():
            if module is not projection and module is not block:
                hooks.enter_context(module.register_forward_hook(record))
        output = trunk.after(layer, tokens)
    return put_in[0], output, passed


def _difference(pair: Tensor, entries: Tensor) -> Tensor:
    """Return the second row minus the first, in some of the entries."""
    return (pair[1].double() - pair[0].double()).cpu()[entries]


def _ratio(step: Tensor, output_step: Tensor, tolerance: float) -> float | None:
    """Return the number s with output_step = s·step, if there is one; exactly 1 when it is 1 up to rounding."""
    scale = float(step @ output_step / step.square().sum())
    if not float((output_step - scale * step).norm()) <= tolerance * float(output_step.norm()):
        return None
    return 1.0 if abs(scale - 1) < tolerance / 4 else scale


def _as_norm(module: nn.Module, like: Tensor, tolerance: float) -> Norm | None:
    """Return what a module computes, if it is a norm: found from its outputs for vectors with known norms."""
    width, large = like.shape[-1], 64.0  # so large that ε does not matter
    signs = torch.ones(width)
    signs[1::2] = -1
    signs = (signs - signs.mean()) / signs.std(correction=0)
    noise = torch.randn(width, generator=torch.Generator().manual_seed(1))
    probes = (large * torch.stack([torch.ones(width), signs, noise])).to(like)
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
    """Return rows x of the given length (and mean 0, if centered) that bring a⊙x nearest to t."""
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
