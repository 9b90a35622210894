"""Every family of language models in transformers: it is edited with all promises, or refused with a reason."""

from __future__ import annotations

import copy
import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rebind.edit.targets import ContextSettings, TargetSettings
from rebind.errors import InputError, NumericalWarning
from rebind.models.caches import select_cache
from rebind.models.language_model import LanguageModel
from rebind.models.mlp_output import GateMap, ScaleMap, output_map
from rebind.models.sites import Site, find_sites, memory_of, module_at, stored_weight
from rebind.models.tokens import Tokens
from rebind.models.trunk import Trunk
from tests import tiny
from tests.edit.editors import FACTS, open_editor, rewrite
from tests.families import tokens as random_ids
from tests.model_types import EDITED, LANGUAGE_MODELS, REFUSED, build
from tests.support import Draw, assert_close, raises

ROOT = Path(__file__).parents[2]
NOT_LINEAR = {"gemma3n_text", "gemma4_text", "inkling_text", "rwkv"}  # behind their MLPs: followed to first order
NARROW = {"xglm"}  # fails in float64
ROWS = [(5, 9, 7, 3), (4, 8, 6, 7, 12, 30, 2), (11, 3)]
PREFIXES, SUFFIXES = (0, 3, 1, 19), (5, 2, 4, 1)  # lengths; one prefix is longer than the sliding windows
CHECKED = [0, 3]
SEARCH = TargetSettings(steps=6, rate=0.3, clamp=1.0, decay=0.0, kl=0.0, keep=0.0, end=0.0)

families = pytest.mark.parametrize("kind", EDITED, scope="module")  # a family's tests in a row: it is built once


base_model = functools.cache(build)


@functools.cache
def trunk_of(kind: str) -> Trunk:
    model = copy.deepcopy(base_model(kind))
    return tiny.trunk(model if kind in NARROW else model.double())


@pytest.fixture
def trunk(kind: str) -> Trunk:
    return trunk_of(kind)


@pytest.fixture
def tolerance(kind: str) -> float:
    return 1e-3 if kind in NARROW else 1e-5  # the library computes norms and routers in float32 in any dtype


def random_rows(lengths: tuple[int, ...], seed: int) -> list[list[int]]:
    return [random_ids(1, length, seed + index)[0].tolist() for index, length in enumerate(lengths)]


@torch.no_grad()
def plain(model: Any, row: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([row])).logits[0]


class AtSubjects:
    """What happens in a block at the last tokens of `ROWS`."""

    def __init__(self, trunk: Trunk, site: Site) -> None:
        self.trunk, self.site, self.module = trunk, site, module_at(trunk.model, site.name)
        self.tokens = Tokens.left_padded(ROWS, trunk.device)
        places = [-1 if trunk.shares_prefixes else len(row) - 1 for row in ROWS]  # padding is in front, or behind
        self.where = torch.arange(len(ROWS)), torch.tensor(places)

    def inputs(self, module: nn.Module) -> Tensor:
        return self.trunk.inputs([module], self.tokens)[0][:, -1].double()

    def states(self, change: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the states after the block and the output of the site, with a change added to it."""
        outputs: list[Tensor] = []

        def add(_: nn.Module, __: Any, out: Tensor) -> Tensor:
            rows = out.clone().reshape(*self.tokens.ids.shape, -1)
            outputs.append(rows[self.where].double())
            if change is not None:
                rows[self.where] += change.to(rows)
            return rows.reshape(out.shape)

        with self.module.register_forward_hook(add):
            states = self.trunk.after(self.site.layer, self.tokens)[:, -1].double()
        return states, outputs[0]


@pytest.mark.parametrize("kind", REFUSED)
def test_a_family_that_cannot_be_edited_says_why(kind):
    with raises(InputError, REFUSED[kind]):
        LanguageModel(build(kind), tiny.tokenizer()).trunk  # noqa: B018


def test_at_most_five_families_are_refused_and_the_documents_count_them():
    assert len(REFUSED) <= 5
    assert set(REFUSED) <= set(LANGUAGE_MODELS)
    for name in ("README.md", "docs/editing.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert f"{len(EDITED)} of the {len(LANGUAGE_MODELS)} families" in text


@families
def test_a_site_answers_its_key_and_a_change_arrives_in_the_stream(trunk, kind, tolerance):
    """Also where a key is spread over routed experts, and where a gate scales the answer."""
    sites = {site.name.removeprefix(site.block): site for site in find_sites(trunk.model)[:-1]}
    for site in sites.values():  # one of each kind
        subjects = AtSubjects(trunk, site)
        before, output = subjects.states()
        memory = memory_of(subjects.module).double()
        bias = getattr(subjects.module, "bias", None)
        if not hasattr(subjects.module, "down_proj_bias"):  # of experts, weighted too
            answer = subjects.inputs(subjects.module) @ memory.mT
            assert_close(answer if bias is None else answer + bias, output, tolerance)
        missing = 0.02 * before.abs().mean() * Draw(1).normal(*before.shape)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NumericalWarning)
            added = output_map(trunk, site.layer, subjects.module)
            change = added.change(missing, subjects.inputs)
        arrived = subjects.states(change)[0] - before
        cosine = torch.cosine_similarity(arrived, missing, dim=-1)
        assert float(cosine.median()) > 0.6
        if isinstance(added, (ScaleMap, GateMap)) and kind not in NOT_LINEAR:
            assert_close(arrived / missing.norm(), missing / missing.norm(), 10 * tolerance)


@families
def test_prefixes_and_padding_change_nothing(trunk, kind, tolerance):
    """Loss and gradient of suffixes behind shared, padded prefixes are those of whole unpadded runs."""
    model, layer = trunk.model, 1
    prefixes, suffixes = random_rows(PREFIXES, seed=10), random_rows(SUFFIXES, seed=20)
    past = Tokens.left_padded(prefixes, trunk.device)
    cache, tokens = trunk.cache(past), Tokens.following(past, suffixes)
    ends = torch.tensor([(row, len(suffix) - 1) for row, suffix in enumerate(suffixes)])
    wholes = [[*prefix, *suffix] for prefix, suffix in zip(prefixes, suffixes, strict=True)]
    expected = torch.stack([plain(model, wholes[row])[-1] for row in CHECKED])
    assert_close(trunk.logits(tokens, ends, cache=cache)[CHECKED], expected, tolerance)
    some = torch.tensor(CHECKED[::-1])
    ends_of_some = torch.stack([torch.arange(2), ends[some, 1]], dim=-1)
    selected = trunk.logits(tokens.select(some), ends_of_some, cache=select_cache(cache, some))
    assert_close(selected.flip(0), expected, tolerance)

    hidden = trunk.after(layer, tokens, cache=cache)  # the runs before have not changed the cache
    delta = (0.1 * Draw(5).normal(len(wholes), hidden.shape[-1])).to(hidden).requires_grad_()
    moved = torch.cat([hidden[:, :1] + delta.unsqueeze(1), hidden[:, 1:]], dim=1)
    logits = trunk.logits(tokens, ends, cache=cache, resume=(layer, moved))
    (gradient,) = torch.autograd.grad(-torch.log_softmax(logits, -1)[:, 7].sum(), delta)
    for row in CHECKED:
        whole = wholes[row]
        alone = delta[row].detach().clone().requires_grad_()
        start, everything = len(prefixes[row]), Tokens.right_padded([whole], trunk.device)
        states = trunk.after(layer, everything)
        states = torch.cat([states[:, :start], states[:, start : start + 1] + alone, states[:, start + 1 :]], dim=1)
        end = torch.tensor([(0, len(whole) - 1)])
        loss = -torch.log_softmax(trunk.logits(everything, end, resume=(layer, states)), -1)[0, 7]
        assert_close(-torch.log_softmax(logits[row].detach(), -1)[7], loss.detach(), tolerance)
        (same,) = torch.autograd.grad(loss, alone)
        assert_close(gradient[row] / same.norm(), same / same.norm(), 10 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "qwen3_next", "falcon_h1", "jamba", "mamba", "deepseek_v4"])
def test_whether_prefixes_are_shared_does_not_depend_on_rounding(kind, dtype):
    assert tiny.trunk(build(kind).to(dtype)).shares_prefixes is (kind in ("llama", "qwen3_next", "falcon_h1"))


@pytest.mark.filterwarnings("ignore::rebind.errors.NumericalWarning")
@families
def test_an_edit_is_believed_replayed_and_undone_exactly(kind):
    model, twin = copy.deepcopy(base_model(kind)), copy.deepcopy(base_model(kind))
    base = tiny.weights(model)
    alone = {"moment_tokens": 500, "framings": ["start"], "contexts": ContextSettings(first_words=())}
    editor = open_editor(model, **alone)
    edit = rewrite(editor, FACTS[0], method="rome", layers=[1], targets=SEARCH)
    before, after = (edit.scores[moment][0]["nll"] for moment in ("before", "after"))
    assert after < before
    edited = tiny.weights(model)
    changed = [parameter for name, parameter in model.named_parameters() if base[name] != edited[name]]
    assert len(changed) == 1
    assert changed[0] is stored_weight(module_at(model, editor.sites[1].name))
    open_editor(twin, editor.ledger, **alone)
    assert tiny.weights(twin) == edited
    editor.undo(edit.id)
    assert tiny.weights(model) == base
