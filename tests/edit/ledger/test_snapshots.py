"""Snapshots save time and decide nothing: with them, without them and with damaged ones a model has the same bytes."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rebind.edit.dense.layers import DenseLayers
from rebind.edit.facts.fact import Fact
from rebind.edit.ledger.edit import Edit
from rebind.edit.ledger.fold import EditedWeights
from rebind.edit.ledger.ledger import Ledger
from rebind.edit.ledger.log import LedgerState
from rebind.edit.ledger.snapshots import KEY_FILE, Snapshots
from rebind.edit.moments import OldKeys, OldStates
from rebind.errors import InputError, LedgerError
from rebind.memory.write import Write
from rebind.storage import data_dir
from tests.edit.writes import D_K, D_V, MODEL, SITES, ids, new_edit, open_ledger
from tests.support import Draw, raises

WIDTH, LAYER = 5, 1
MOMENTS = SimpleNamespace(source={"corpus": "made up", "tokens": 7})


def dense_edit(seed: int, active: list[Edit]) -> Edit:
    """Return an edit with rows about two of six subjects, which agrees with earlier edits about them or does not."""
    draw = Draw(seed, torch.float32)
    subjects = [f"thing {(seed * step) % 6}" for step in (1, 5)]
    facts = tuple(Fact.parse(f"The {{{subject}}} number {seed} is", "new") for subject in dict.fromkeys(subjects))
    joints = []
    for group, fact in enumerate(facts):
        before = [edit.id for edit in active if any(one.subject == fact.subject for one in edit.facts)]
        if before and seed % 3:
            joints.append({"group": group, "carries": before[: seed % 2], "replaces": before[seed % 2 :]})
    variants = len(facts) + sum(bool(joint["carries"]) for joint in joints)
    owner = torch.arange(variants).repeat_interleave(2)
    tensors = {
        "rows/states": draw.normal(len(owner), WIDTH),
        "rows/thresholds": draw.uniform(len(owner)),
        "rows/owner": owner,
        "rows/values": draw.normal(variants, WIDTH),
    }
    settings = {
        "layers": [LAYER],
        "lam": None,
        "moments": MOMENTS.source,
        "rows": {"joint": joints, "count": len(owner)},
    }
    return Edit(facts=facts, method="dense", settings=settings, sites=(), tensors=tensors)


def consolidation(seed: int, active: list[Edit]) -> Edit:
    """Return an edit of weights that takes the first subject out of the dense memory."""
    moved = {"edits": [edit.id for edit in active if edit.has_rows], "subjects": [f"thing {seed % 6}"]}
    return new_edit(seed, settings={"layers": [2, 3], "lam": 0.3, "moments": MOMENTS.source, "consolidates": moved})


def weight_edit(seed: int, method: str) -> Edit:
    settings = {"layers": [2, 3], "lam": 0.3, "moments": MOMENTS.source}
    return new_edit(seed, method=method, sites=SITES[: 1 + seed % 2], settings=settings)


def new_weights() -> EditedWeights:
    """Return the weights of a model with both sites, as a new process has them."""
    torch.manual_seed(0)
    model = nn.Module()
    model.model = nn.Module()
    model.model.layers = nn.ModuleList(nn.Module() for _ in range(4))
    for layer in model.model.layers:
        layer.mlp = nn.Module()
        layer.mlp.down_proj = nn.Linear(D_K, D_V, bias=False, dtype=torch.bfloat16)
    weights = EditedWeights(model, MOMENTS)
    weights.old_keys = {site: OldKeys(Draw(index).moment(D_K)) for index, site in enumerate(SITES)}
    return weights


def new_dense() -> DenseLayers:
    """Return a dense memory of a model with blocks that do nothing, as a new process has it."""
    blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    model = SimpleNamespace(model=blocks, sites=[SimpleNamespace(block=str(index)) for index in range(3)])
    covariance = Draw(3).moment(WIDTH)
    states = OldStates(torch.zeros(WIDTH).double(), covariance, torch.zeros(1, WIDTH))
    dense = DenseLayers(model, SimpleNamespace(collect_states=lambda block: states))
    dense.load(LAYER)
    return dense


class Process:
    """A ledger and the fold of its edits, which starts with nothing but the folder."""

    def __init__(self, folder: Path, *, snapshots: bool = True) -> None:
        self.ledger = Ledger.open(folder, MODEL, model_name="tiny", snapshots=snapshots)
        self.ledger.snapshots.worth_seconds = 0.0  # store everything, however small
        self.weights, self.dense = new_weights(), new_dense()

    def fold(self) -> dict[str, torch.Tensor]:
        active, snapshots = self.ledger.active, self.ledger.snapshots
        folded = dict(self.weights.fold(active, snapshots))
        for layer, memory in self.dense.fold(active, snapshots).items():
            folded |= {f"{layer}/{part}": getattr(memory, part) for part in ("keys", "values", "thresholds")}
        return folded


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert set(one) >= set(other)
    for name, tensor in other.items():
        assert torch.equal(one[name], tensor), name


METHODS = ["memit", "recursive", "alphaedit", "dense", "dense", "consolidate"]
STEP = st.one_of(
    st.tuples(st.just("append"), st.sampled_from(METHODS)),
    st.tuples(st.just("append"), st.sampled_from(METHODS)),
    st.tuples(st.just("switch"), st.integers(0, 30)),
    st.tuples(st.just("compact"), st.integers(0, 4)),
    st.tuples(st.sampled_from(["restart", "damage", "forget"]), st.integers(0, 10)),
)


def append(ledger: Ledger, method: str) -> None:
    seed, active = len(ledger.edits) + 1, list(ledger.active)
    if method == "dense":
        ledger.append(dense_edit(seed, active))
    elif method != "consolidate":
        ledger.append(weight_edit(seed, method))
    elif any(edit.has_rows for edit in active):
        ledger.append(consolidation(seed, active))


def switch(ledger: Ledger, number: int) -> None:
    free = [id for id in ledger.edits.ids if id not in set(ledger.sealed.ids)]
    if free:
        id = free[number % len(free)]
        with suppress(InputError):  # what a consolidation moved is undone together with it
            ledger.switch([id], on=not ledger.is_active(id))


def damage(folder: Path, number: int) -> None:
    files = sorted((folder / "snapshots").glob("*"))
    if files:
        file = files[number % len(files)]
        data = bytearray(file.read_bytes())
        data[(number * 7919) % len(data)] ^= 1
        file.write_bytes(data)


@settings(max_examples=25, deadline=None)
@given(st.lists(STEP, min_size=4, max_size=14))
def test_a_fold_with_snapshots_has_the_bytes_of_a_fold_without(steps):
    with TemporaryDirectory() as temporary:
        folder = Path(temporary, "ledger")
        process = Process(folder)
        for step, value in steps:
            if step == "append":
                append(process.ledger, value)
            elif step == "switch":
                switch(process.ledger, value)
            elif step == "compact" and len(process.ledger.edits) - len(process.ledger.sealed) > value:
                process.ledger.compact(keep_last=value)
            elif step == "damage":
                damage(folder, value)
            elif step == "forget":
                shutil.rmtree(folder / "snapshots", ignore_errors=True)
            if step in ("restart", "damage", "forget"):
                process = Process(folder)
            assert_same(process.fold(), Process(folder, snapshots=False).fold())
        assert_same(Process(folder).fold(), Process(folder, snapshots=False).fold())
        assert process.ledger.verify(full=True) == []


# What they save


def filled(folder: Path, count: int = 40) -> None:
    process = Process(folder)
    for seed in range(count):
        process.ledger.append(weight_edit(seed, "recursive"))
        process.ledger.append(dense_edit(seed, []))
    process.fold()


def test_opening_reads_only_what_is_new(tmp_path, monkeypatch):
    filled(tmp_path / "ledger")
    open_ledger(tmp_path / "ledger").append(weight_edit(99, "memit"))
    lines, writes, read, apply = [], [], LedgerState.read_line, Write.apply
    monkeypatch.setattr(LedgerState, "read_line", lambda *args: lines.append(args) or read(*args))
    monkeypatch.setattr(Write, "apply", lambda *args: writes.append(args) or apply(*args))
    process = Process(tmp_path / "ledger")
    process.fold()
    assert len(lines) <= 1
    assert len(writes) <= 2
    assert process.ledger.undo("e0081").id == "e0081"
    process.fold()
    assert len(writes) <= 4, "an undo of the newest edit costs what the edit touches"


@pytest.mark.parametrize("restart", [False, True])
def test_a_redo_finds_the_fold_before_the_undo(tmp_path, monkeypatch, restart):
    filled(tmp_path / "ledger")
    writes, apply = [], Write.apply
    monkeypatch.setattr(Write, "apply", lambda *args: writes.append(args) or apply(*args))
    process = Process(tmp_path / "ledger")
    before = process.fold()
    process.ledger.undo("e0003")
    process.fold()
    assert writes, "an undo of an old edit folds the later ones again"
    writes.clear()
    process = Process(tmp_path / "ledger") if restart else process
    process.ledger.redo("e0003")
    assert_same(process.fold(), before)
    assert not writes


def test_snapshots_are_bounded(tmp_path):
    process = Process(tmp_path / "ledger")
    process.ledger.snapshots.max_bytes = limit = 3 * 2 * D_K * (D_V + D_K) * 8
    for seed in range(160):
        process.ledger.append(weight_edit(seed, "memit"))
        if seed % 8 == 0:
            process.fold()
    files = list((tmp_path / "ledger" / "snapshots").glob("weights-*"))
    assert 1 <= len(files) <= 8
    assert sum(file.stat().st_size for file in files) <= limit + len(files) * 400


def test_snapshots_of_somebody_else_are_ignored(tmp_path):
    """A ledger that travels may carry snapshots that its log does not account for."""
    folder = tmp_path / "ledger"
    filled(folder, 3)
    expected = Process(folder).fold()
    (data_dir() / KEY_FILE).write_bytes(b"x" * 32)  # this is another user
    for name in Snapshots(folder).names(""):
        assert Snapshots(folder).read(name) is None
    for file in (folder / "snapshots").iterdir():
        file.write_bytes(b"poison")
    assert_same(Process(folder).fold(), expected)


def test_an_altered_line_that_a_snapshot_covers_is_not_used(tmp_path):
    folder = tmp_path / "ledger"
    filled(folder, 3)
    log = folder / "log.jsonl"
    data = log.read_bytes()
    log.write_bytes(data.replace(b"subject 0-0", b"subject 9-9", 1))
    ledger = open_ledger(folder)
    assert ledger.active[-1].id == "e0006"
    with raises(LedgerError, "ledger_damaged"):
        ledger.get("e0001")
    assert len(ledger.verify()) == 1


def test_a_ledger_that_cannot_be_written_needs_no_snapshots(tmp_path, monkeypatch):
    folder = tmp_path / "ledger"
    filled(folder, 2)
    shutil.rmtree(folder / "snapshots")
    (folder / "snapshots").write_text("in the way")
    assert_same(Process(folder).fold(), Process(folder, snapshots=False).fold())


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_a_new_sequence_of_edits_is_known_by_what_it_holds(tmp_path, count):
    ledger = open_ledger(tmp_path / "ledger")
    for seed in range(5):
        ledger.append(new_edit(seed))
    ledger.undo("e0002")
    active = ledger.active
    assert active.ids == ids(active) == ["e0001", "e0003", "e0004", "e0005"]
    assert ids(active[:count]) == ids(list(active)[:count])
    assert ids(active.without("e0003")) == ["e0001", "e0004", "e0005"]
    assert ids(active.including("e0002")) == ["e0001", "e0002", "e0003", "e0004", "e0005"]
    assert ids(active.with_facts_like(new_edit(3).facts)) == ["e0004"]
    assert ids(active.__add__([new_edit(7, id="new")]))[-1] == "new"
