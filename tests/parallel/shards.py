"""What the processes of `test_processes` do: each holds shards of a model, and edits it like a whole one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from rebind import parallel
from rebind.errors import InputError
from rebind.models.sites import memory_of, module_at
from tests import tiny
from tests.edit.editors import FACTS, open_editor, rewrite
from tests.support import raises


def fsdp(folder: Path) -> None:
    """Edit a model that FSDP2 has sharded block by block; refuse others."""
    distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    model = tiny.llama(max_position_embeddings=128)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    check_edits(model, tolerance=1e-6)
    with raises(InputError, "sharded_otherwise"):
        open_editor(fully_shard(tiny.llama(max_position_embeddings=128), mesh=mesh))
    parallel.join_processes("cpu")
    with raises(InputError, "sharded_model"):
        open_editor(model)


def tensor_parallel(folder: Path) -> None:
    """Edit a model that transformers has split by its plan for tensor parallelism."""
    model = AutoModelForCausalLM.from_pretrained(folder.parent / "model", tp_plan="auto")
    assert isinstance(model.model.layers[0].mlp.down_proj.weight, DTensor)
    check_edits(model, tolerance=1e-3)  # each product is a sum over processes, and the search repeats it many times


def check_edits(model: Any, tolerance: float) -> None:
    """Compare an edit with that of the whole model, and undo it."""
    whole, sharded = open_editor(tiny.llama(max_position_embeddings=128)), open_editor(model)
    assert sharded.fingerprint == whole.fingerprint
    expected, edit = rewrite(whole, FACTS[0]), rewrite(sharded, FACTS[0])
    assert expected.sites == edit.sites
    for site in edit.sites:
        assert isinstance(module_at(model, site).weight, DTensor), "it stays sharded"
        before, after, same = (
            whole.weights.base[site],
            memory_of(module_at(whole.model, site)),
            memory_of(module_at(model, site)),
        )
        assert not torch.equal(before, same)
        torch.testing.assert_close(same - before, after - before, rtol=0.0, atol=tolerance)
    sharded.undo(edit.id)
    for site in edit.sites:
        assert torch.equal(memory_of(module_at(model, site)), whole.weights.base[site])
    whole.undo(expected.id)
    plain = sharded.score(FACTS)[0].nll
    for editor in (whole, sharded):
        rewrite(editor, FACTS[0], method="dense")
    assert sharded.score(FACTS)[0].nll < plain
    pairs = zip(sharded.score(FACTS), whole.score(FACTS), strict=True)
    assert all(abs(one.nll - two.nll) < 100 * tolerance for one, two in pairs)
