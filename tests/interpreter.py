"""Triton's interpreter, faster: it does the same work once instead of thousands of times.

Interpreted kernels spend most of their time on types and on patches, not on numbers:

- every call of a jitted function patches the whole language again, though the kernel's launch has done so;
- every tile computes the shape, the size and the name of its type again, which depend on the shape alone;
- every sum of integers is also computed in 64 bits, for a check that the interpreter never makes (`debug` is off);
- every operation builds the table from Triton's dtypes to NumPy's again.

No result of a kernel changes, and a shape that Triton refuses is still refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock


@contextmanager
def quick() -> Iterator[None]:
    """Interpret kernels without repeated work."""
    with ExitStack() as stack:
        for patch in (*_language_patches(), *_type_patches(), *_number_patches()):
            stack.enter_context(patch)
        yield


def _language_patches() -> list[Any]:
    """Patch the language once per launch and per way in which a function names it (`tl`, `tl.core`)."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch_language, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[tuple[bool, bool]] = set()

    def patch_once(fn: Any) -> Any:
        modules = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        names = tl in modules, tl.core in modules
        if names in patched:
            return None  # a call inside of a kernel, which ignores it
        patched.add(names)
        return patch_language(fn)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()  # the end of the launch before has taken its patches back
        launch(self, *args, **kwargs)

    return [
        mock.patch.object(interpreter, "_patch_lang", patch_once),
        mock.patch.object(interpreter.GridExecutor, "__call__", launch_anew),
    ]


def _type_patches() -> list[Any]:
    """Remember what depends on a tile's shape alone. Tiles of one shape then share it, and need no broadcasting."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    broadcast = TritonSemantic.broadcast_impl_value
    blocks: dict[tuple[int, ...], tuple[Any, int]] = {}
    tensors: dict[int, tuple[Any, Any]] = {}  # by the identity of a shape in `blocks`

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        if sizes not in blocks:
            make_block(self, element_ty, shape)
            blocks[sizes] = self.shape, self.numel
            return
        self.element_ty = element_ty
        self.shape, self.numel = blocks[sizes]
        self.name = f"<{sizes}, {element_ty}>"

    def tensor(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else None
        if id(shape) not in tensors:
            make_tensor(self, handle, type)
            if shape is None or any(shape is known for known, _ in blocks.values()):
                tensors[id(shape)] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = tensors[id(shape)]

    def broadcast_pair(self: Any, left: Any, right: Any) -> Any:
        if left.type.is_block() and right.type.is_block() and left.type.shape is right.type.shape:
            return left, right
        return broadcast(self, left, right)

    return [
        mock.patch.object(core.block_type, "__init__", block),
        mock.patch.object(core.tensor, "__init__", tensor),
        mock.patch.object(TritonSemantic, "broadcast_impl_value", broadcast_pair),
    ]


def _number_patches() -> list[Any]:
    """Look dtypes up in one table, and leave out sums that nothing reads."""
    import triton.language as tl
    from triton.runtime import interpreter

    look_up = interpreter._get_np_dtype
    dtypes: dict[str, Any] = {}

    def dtype_of(tt_dtype: Any) -> Any:
        element = tt_dtype.element_ty if isinstance(tt_dtype, tl.block_type) else tt_dtype
        if element.name not in dtypes:
            dtypes[element.name] = look_up(element)
        return dtypes[element.name]

    builder = interpreter.interpreter_builder
    patches = [mock.patch.object(interpreter, "_get_np_dtype", dtype_of)]
    if not builder.options.debug:
        options = dataclasses.replace(builder.options, sanitize_overflow=False)
        patches.append(mock.patch.object(builder, "options", options))
    return patches
