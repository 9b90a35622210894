"""Reads with one query a sequence, their gradients, and the kernels that a GPU has for them."""

from __future__ import annotations

import math

import pytest
import torch

from rebind.lab.reading import _doubled, constant, corrected, rows, similarity
from rebind.lab.retrieval import FEATURES, Task, correct, hot
from rebind.lab.squash import squashed, unwrite, write
from rebind.memory import get_feature
from rebind.memory.programmer import FastWeightProgrammer
from tests.support import assert_close

CPU = torch.device("cpu")
DEVICES = ["cuda"] if torch.cuda.is_available() else ["cpu"]  # where Triton's kernels run, or are interpreted


def doubles(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def gradients(made, inputs):
    """Of a sum with other weights at every place."""
    weights = torch.rand(made.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return torch.autograd.grad((made * weights).sum(), inputs, retain_graph=True)


def same_with_gradients(got, expected, inputs):
    torch.testing.assert_close(got, expected)
    for one, other in zip(gradients(got, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(one, other)


def favor_shares(feature, k, q):
    """c / (Σ c + 1e-6), c = φ(q)·φ(k), all of it in logarithms."""

    def exponents(x):
        x = x * feature.dim**-0.25
        angle = x @ feature.projection.to(x).mT
        return torch.cat([angle, -angle], dim=-1) - x.square().sum(-1, keepdim=True) / 2

    logs = torch.logsumexp(exponents(q).unsqueeze(-2) + exponents(k).unsqueeze(-3), dim=-1) - math.log(feature.width)
    least = torch.full_like(logs[..., :1], math.log(1e-6))
    return (logs - torch.logsumexp(torch.cat([logs, least], dim=-1), dim=-1, keepdim=True)).exp()


class TestReading:
    """What is written by hand is what autograd makes of the definitions."""

    @pytest.mark.parametrize("name", [name for name in FEATURES if name != "softmax"])
    @pytest.mark.parametrize("length", [1, 9])
    def test_similarity_is_that_of_the_features(self, name, length):
        kind, options = FEATURES[name]
        feature = get_feature(kind, 6, **options)
        k, q = doubles(2, 3, length, 6), doubles(2, 3, 1, 6, seed=1)
        signs = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
        k_signed, q_signed = k * signs, (q - 0.5) * 2
        got = similarity(feature, constant(feature, k), k_signed, q_signed)
        products = got.scaled if got.shift is None else got.scaled * got.shift.exp()
        expected = feature(q_signed) @ feature(k_signed).mT
        same_with_gradients(products, expected, (k, q))
        same_with_gradients(got.share(got.scaled), expected / (expected.sum(-1, keepdim=True) + 1e-6), (k, q))

    def test_a_key_in_the_corner_of_relu_is_not_moved(self):
        feature = get_feature("dpfp", 4, nu=1)
        k, q = -doubles(1, 3, 4).detach(), -doubles(1, 1, 4, seed=1).detach()
        k[0, 1] = 0.0
        k[0, 2, 1] = 0.0
        k.requires_grad_(), q.requires_grad_()
        expected = feature(q) @ feature(k).mT
        same_with_gradients(similarity(feature, constant(feature, k), k, q).scaled, expected, (k, q))

    @pytest.mark.parametrize("queries", [1, 5])
    @pytest.mark.parametrize("scale", ["w", 1e-3, 1.0, 5.0, 50.0])
    def test_favor_reads_whatever_the_keys_are(self, queries, scale):
        """In float32 what logarithms give in float64, gradients too: where e^‖w‖² overflows, where all underflows."""
        feature = get_feature("favor", 64, m=128)
        longest = feature.projection.norm(dim=-1).topk(4).indices
        if scale == "w":  # keys and queries at projections with ‖w‖² of 90 and more, and some elsewhere
            k = torch.cat([feature.projection[longest] * 64**0.25, feature.projection[:3]])[None]
        else:
            k = scale * torch.randn(1, 7, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        k, q = k.float(), k[:, :queries].float()
        found = {}
        for dtype in (torch.float32, torch.float64):
            keys, asked = k.to(dtype).requires_grad_(), q.to(dtype).requires_grad_()
            if dtype == torch.float32:
                got = similarity(feature, constant(feature, keys), keys, asked)
                read = got.share(got.scaled)
            else:
                read = favor_shares(feature, keys, asked)
            weights = torch.arange(1, 8, dtype=dtype) / 8
            found[dtype] = (read, *torch.autograd.grad((read * weights).sum(), (keys, asked)))
        rough = 2e-2 if scale == 50.0 else 2e-3  # exponents of 1e5 have their last digit at 1e-2
        for one, other in zip(found[torch.float32], found[torch.float64], strict=True):
            assert one.isfinite().all()
            torch.testing.assert_close(
                one.double(), other, rtol=rough, atol=rough * max(1e-3, float(other.detach().abs().max()))
            )

    @pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 150])
    def test_one_query_is_corrected_as_many(self, length):
        """In chunks and with a gradient by hand, or by one triangular system: the same."""
        k, q, erase = doubles(2, length, 5), doubles(2, 1, 5, seed=1), doubles(2, length, seed=2)
        keys = k / k.sum(-1, keepdim=True)
        twice = correct(keys, q.expand(-1, 2, -1), erase)[:, :1]
        same_with_gradients(corrected(keys, q, erase), twice, (k, q, erase))

    @pytest.mark.parametrize("count", [1, 2, 32, 64])
    def test_doubling_inverts(self, count):
        matrix = 4 * doubles(3, 2, count, count).detach()
        one = torch.eye(count, dtype=torch.float64)
        lower = one + matrix.tril(-1)
        inverse = _doubled(matrix, one.expand_as(matrix).contiguous())
        assert torch.equal(inverse, inverse.tril())
        expected = torch.linalg.solve_triangular(lower, one.expand_as(lower), upper=False)
        torch.testing.assert_close(inverse, expected, rtol=1e-9, atol=0)

    def test_doubling_does_not_cancel(self):
        """Of the same key over and over, in float32: powers of this matrix reach 1e18, its inverse only 1."""
        inverse = _doubled(torch.ones(1, 64, 64), torch.eye(64).expand(1, 64, 64).contiguous())
        assert torch.equal(inverse[0], torch.eye(64) - torch.diag(torch.ones(63), -1))

    def test_squashed_memories_are_the_programmers(self):
        phi_k = doubles(2, 5, 3)
        values = torch.tensor([[0, 1, 0, 3, 1], [2, 2, 2, 0, 1]])
        memory, one_hots = torch.zeros(2, 4, 3, dtype=torch.float64), hot(values, 4).double()
        for t in range(5):
            memory = FastWeightProgrammer().step(memory, one_hots[:, t], phi_k[:, t])
        same_with_gradients(squashed(phi_k, values, 4), memory, (phi_k,))
        torch.testing.assert_close(squashed(phi_k.detach(), values, 4), memory.detach())

    @pytest.mark.parametrize(("length", "width", "nu"), [(1, 2, 1), (33, 5, 3), (40, 24, 2), (70, 64, 1)])
    @pytest.mark.parametrize("device", DEVICES)
    def test_kernels_multiply_as_the_definition(self, length, width, nu, device):
        kernels = pytest.importorskip("rebind.lab.dpfp_kernels")
        generator = torch.Generator().manual_seed(0)
        k, q = (torch.randn(3, n, width, generator=generator, dtype=torch.float64) for n in (length, 1))
        k[0, 0, 0] = 0.0  # a corner of relu
        slope = torch.randn(3, 1, length, generator=generator, dtype=torch.float64)
        feature = get_feature("dpfp", width, nu=nu)
        k.requires_grad_(), q.requires_grad_()
        expected = feature(q) @ feature(k).mT
        truth = torch.autograd.grad(expected, (k, q), slope)
        keys, query = (x.detach().float().to(device) for x in (k, q))
        assert_close(kernels.products(keys, query, nu).cpu().double(), expected.detach()[:, 0], 1e-5)
        for one, true in zip(kernels.slopes(keys, query, slope[:, 0].float().to(device), nu), truth, strict=True):
            assert_close(one.cpu().double(), true, 1e-5)

    @pytest.mark.parametrize(("length", "width"), [(1, 1), (5, 3), (70, 24), (130, 64)])
    @pytest.mark.parametrize("device", DEVICES)
    def test_kernels_correct_as_the_definition(self, length, width, device):
        kernels = pytest.importorskip("rebind.lab.correct_kernels")
        k = torch.nn.functional.normalize(doubles(3, length, width).detach(), dim=-1).requires_grad_()
        q, erase = doubles(3, 1, width), torch.rand(3, length, dtype=torch.float64, requires_grad=True)
        slope = doubles(3, 1, length).detach()
        expected = corrected(k, q, erase)
        truth = torch.autograd.grad(expected, (k, q, erase), slope)
        on_device = [one.detach().float().to(device) for one in (k, q, erase)]
        x, rest = kernels.sweep(*on_device)
        assert_close(x.cpu().double(), expected.detach()[:, 0], 1e-5)
        found = kernels.unsweep(on_device[0], on_device[2], x, rest, slope[:, 0].float().to(device))
        for one, true in zip(found, truth, strict=True):
            assert_close(one.cpu().double(), true, 1e-5)

    @pytest.mark.parametrize(("length", "size", "width"), [(1, 1, 1), (7, 5, 3), (12, 40, 70), (60, 4, 9)])
    @pytest.mark.parametrize("device", DEVICES)
    def test_kernels_squash_as_the_definition(self, length, size, width, device):
        kernels = pytest.importorskip("rebind.lab.squash_kernels")
        generator = torch.Generator().manual_seed(0)
        phi_k = torch.randn(2, length, width, generator=generator) * torch.tensor([1e-3, 3.0]).view(2, 1, 1)
        values = torch.randint(size, (2, length), generator=generator)
        slope = torch.randn(2, size, width, generator=generator)
        expected, (states,) = write(phi_k.double(), values, size, True)
        got, kept = kernels.write(phi_k.to(device), values.to(device), size, True)
        alone, _ = kernels.write(phi_k.to(device), values.to(device), size, False)
        torch.testing.assert_close(got.cpu().double(), expected, rtol=2e-6, atol=2e-9)
        assert torch.equal(alone, got)
        d_phi = kernels.unwrite(slope.to(device), values.to(device), *kept)
        torch.testing.assert_close(d_phi.cpu().double(), unwrite(slope.double(), values, states), rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("once", [True, False])
    def test_rows_give_their_gradients_back(self, once):
        task = Task(5, 5, replacement=not once)
        keys, _ = task.draw(3, [torch.Generator().manual_seed(seed) for seed in (0, 1)])
        table = doubles(2, 5, 4)
        back = keys.argsort(-1) if once else hot(keys, 5).double()
        expected = torch.stack([one[index] for one, index in zip(table, keys, strict=True)])
        same_with_gradients(rows(table, keys, back), expected, (table,))
