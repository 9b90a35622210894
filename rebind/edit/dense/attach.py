"""Put a stored memory onto a plain transformers model, in any process, and take it off again."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rebind.edit.dense.files import StoredLayer, StoredMemory, load_memory
from rebind.edit.dense.hook import MemoryHook, mean_states, require_no_memory
from rebind.errors import InputError
from rebind.models.weights.fingerprint import fingerprint
from rebind.models.weights.placement import device_of

SAME_STATES = 0.8  # the median cosine with the probes below which a model is another one


class AttachedMemory:
    """A memory that a model reads, until `remove()` or the end of a `with` block."""

    def __init__(self, stored: StoredMemory, handles: list[RemovableHandle]) -> None:
        self.stored, self._handles = stored, handles

    def __repr__(self) -> str:
        state = f"{self.stored.rows} rows of {len(self.stored.facts)} facts" if self._handles else "removed"
        return f"AttachedMemory({self.stored.model}: {state})"

    def remove(self) -> None:
        """Take the memory off: the model computes what it did before. Doing so twice is no error."""
        for handle in self._handles:
            handle.remove()
        if self._handles:
            forget_compiled()
        self._handles = []

    def __enter__(self) -> AttachedMemory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()


@torch.inference_mode(False)  # the model may be trained later
def attach(model: Any, memory: str | Path | StoredMemory, *, check: bool = True) -> AttachedMemory:
    """Let a transformers model read the dense memory in a folder.

    Nothing in the model changes but hooks on the output of a block, so it may be in any dtype, quantized, or spread
    over devices. `check` compares the model with the one that the memory was made for: by its fingerprint or, if that
    differs, by what it computes after a few prompts.
    """
    stored = memory if isinstance(memory, StoredMemory) else load_memory(memory)
    inner = _unwrap(model)
    blocks = {number: _block(inner, layer, stored) for number, layer in stored.layers.items()}
    if check and fingerprint(inner) != stored.fingerprint:
        _require_same_states(inner, blocks, stored)
    handles = []
    for number, layer in stored.layers.items():
        hook = MemoryHook.on(blocks[number], layer.whitening, layer.memory, layer.stream_axis)
        handles.append(blocks[number].register_forward_hook(hook))
    forget_compiled()
    return AttachedMemory(stored, handles)


def forget_compiled() -> None:
    """Drop what torch.compile has compiled: it does not look again for hooks that come or go later."""
    if "torch._dynamo" in sys.modules:  # importing it takes seconds
        torch.compiler.reset()


def _unwrap(model: Any) -> nn.Module:
    """Return the model of transformers in a compiled model or an adapter of peft."""
    model = getattr(model, "_orig_mod", model)
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise InputError(
            f"Got a {type(model).__name__}", expected="a causal language model of transformers", code="not_a_model"
        )
    return model


def _block(model: nn.Module, layer: StoredLayer, stored: StoredMemory) -> nn.Module:
    try:
        block = model.get_submodule(layer.block)
    except AttributeError:
        raise _other_model(stored, f"it has no module {layer.block}") from None
    config: Any = model.config
    width = config.get_text_config().hidden_size
    if width != layer.memory.keys.shape[-1]:
        raise _other_model(stored, f"its hidden states are {width} wide, not {layer.memory.keys.shape[-1]}")
    require_no_memory(block, layer.block)
    return block


@torch.no_grad()
def _require_same_states(model: nn.Module, blocks: dict[int, nn.Module], stored: StoredMemory) -> None:
    """Raise unless the model computes nearly the states that the memory was made for."""
    overlaps: list[Tensor] = []
    for index, ids in enumerate(stored.probe_ids):
        try:
            outputs = _outputs(model, blocks, ids)
        except (IndexError, RuntimeError) as problem:
            raise _other_model(stored, f"it cannot run the tokens of that model ({problem})") from None
        for number, output in outputs.items():
            layer = stored.layers[number]
            width = layer.memory.keys.shape[-1]
            states = mean_states(output[0] if isinstance(output, (tuple, list)) else output, width, layer.stream_axis)
            last = layer.whitening(states.reshape(-1, width)[-1].float().cpu())
            overlaps.append(last @ layer.probe[index])
    median = float(torch.stack(overlaps).median()) if overlaps else 0.0
    if not median >= SAME_STATES:
        difference = f"its hidden states have a similarity of {median:.2f}, {SAME_STATES:g} is needed"
        raise _other_model(
            stored, difference, ", or use check=False if it is that model, quantized: facts may be missed"
        )


def _outputs(model: Any, blocks: dict[int, nn.Module], ids: Sequence[int]) -> dict[int, Any]:
    """Return what each block returns for one row of tokens."""
    outputs: dict[int, Any] = {}

    def record(number: int, _: nn.Module, __: Any, output: Any) -> None:
        outputs[number] = output

    with ExitStack() as hooks:
        for number, block in blocks.items():
            hooks.enter_context(block.register_forward_hook(partial(record, number)))
        model(input_ids=torch.tensor([ids], device=device_of(model.get_input_embeddings())))
    return outputs


def _other_model(stored: StoredMemory, problem: str, otherwise: str = "") -> InputError:
    return InputError(
        f"The memory belongs to {stored.model} ({stored.fingerprint[:12]}…), and this is another model: {problem}",
        advice=f"Load that model, in any dtype{otherwise}",
        code="memory_of_other_model",
    )
