"""A stack trains each of its models as torch would train it alone."""

from __future__ import annotations

import math

import pytest
import torch

from rebind.lab.stacks import ModelStack, StackTraining, stack_padded, train_all

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SIZES, RATES = (2, 3), (0.1, 0.03)


def parameters(size):
    """A linear map of this width, and an offset."""
    generator = torch.Generator().manual_seed(size)
    return {"weight": torch.randn(1, size, generator=generator), "offset": torch.randn(1, generator=generator)}


def loss(p, lesson):
    """Squared errors of x [models, B, 3], where a model of width 2 sees a zero in place of the last number."""
    x, y = lesson
    return ((x @ p["weight"].mT).squeeze(-1) + p["offset"] - y).square().mean(-1)


def lesson(step):
    generator = torch.Generator().manual_seed(100 + step)
    x, y = torch.randn(2, 5, 3, generator=generator), torch.randn(2, 5, generator=generator)
    x[0, :, 2] = 0.0
    return x, y


def stack(device="cpu", **options):
    return ModelStack([parameters(size) for size in SIZES], RATES, loss, torch.device(device), **options)


def trained_alone(row, steps, *, decay=0.0, clip=False, cosine=None):
    weights = [tensor.requires_grad_() for tensor in parameters(SIZES[row]).values()]
    optimizer = torch.optim.AdamW(weights, lr=RATES[row], weight_decay=decay)
    for step in range(steps):
        if cosine:
            optimizer.param_groups[0]["lr"] = RATES[row] * 0.5 * (1 + math.cos(math.pi * step / cosine))
        x, y = (part[row] for part in lesson(step))
        optimizer.zero_grad()
        (x[:, : SIZES[row]] @ weights[0].mT + weights[1] - y.unsqueeze(-1)).square().mean().backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
    return [tensor.detach() for tensor in weights]


@pytest.mark.parametrize("options", [{}, {"decay": 0.1, "clip": True, "cosine": 8}])
@pytest.mark.parametrize("device", DEVICES)
def test_every_model_learns_what_it_would_learn_alone(options, device):
    names = {"decay": "weight_decay", "clip": "clip", "cosine": "cosine_steps"}
    models = stack(device, **{names[name]: value for name, value in options.items()})
    with torch.cuda.stream(models.stream):
        for step in range(7):
            models.step(tuple(part.to(device) for part in lesson(step)))
        stacked = {name: tensor.detach().cpu() for name, tensor in models.parameters().items()}
    for row, size in enumerate(SIZES):
        weight, offset = trained_alone(row, 7, **options)
        torch.testing.assert_close(stacked["weight"][row, :, :size], weight, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(stacked["offset"][row], offset, rtol=1e-4, atol=1e-6)
    assert float(stacked["weight"][0, 0, 2]) == 0.0  # padding stays zero


@pytest.mark.parametrize("device", DEVICES)
def test_models_that_leave_do_not_change_the_others(device):
    both, one = stack(device), stack(device)
    for models in (both, one):
        with torch.cuda.stream(models.stream):
            for step in range(6):
                if models is one and step == 3:
                    models.keep([1])
                models.step(tuple(part[-len(models) :].to(device) for part in lesson(step)))
    torch.testing.assert_close(one.theta[0], both.theta[1])


def test_gradients_that_are_not_finite_are_skipped_when_clipping():
    models, other = stack(clip=True), stack(clip=True)
    before = models.theta.detach().clone()
    x, y = lesson(0)
    models.step((x, torch.stack([y[0] * float("nan"), y[1]])))
    other.step((x, y))
    assert torch.equal(models.theta[0], before[0])
    assert torch.equal(models.theta[1], other.theta[1])


def test_padding_fills_the_ends():
    stacked = stack_padded([torch.ones(1, 2), torch.ones(2, 1)], value=7.0)
    assert stacked.tolist() == [[[1, 1], [7, 7]], [[1, 7], [1, 7]]]


class Countdown(StackTraining):
    """Model i ends at the first evaluation after i steps."""

    def draw_lessons(self, count):
        return [tuple(part[self.rows()] for part in lesson(self.steps + step)) for step in range(count)]

    def evaluate(self):
        return torch.tensor([float(index) for index in self.members])

    def ended(self, scores):
        return {index: {"steps": self.steps} for index in scores if self.steps >= index}

    def rows(self):
        return [index % 10 - 1 for index in self.members]


def test_stacks_train_in_turn_and_rows_keep_their_order():
    trainings = [Countdown(stack(), {first + 1: {}, first + 2: {}}, steps=30, every=2) for first in (10, 0)]
    assert train_all(trainings) == [{"steps": 2}, {"steps": 2}, {"steps": 12}, {"steps": 12}]
    assert [training.members for training in trainings] == [[], []]
