"""Every exception and warning of rebind.

An error is data: what is wrong (`problem`), what would have been accepted (`expected`), what to do next (`advice`)
and a stable name for programs and tests (`code`). Advice refers to settings by name, in braces:

    raise InputError(
        "The search stopped after 20 steps",
        advice="Try {targets.steps}, or use {force} to write the edit anyway",
        settings={"targets.steps": 60, "force": True},
        code="search_too_short",
    )

The library spells a setting as a Python argument (`force=True`, `targets with steps=60`), the command line as an option
(`--force`, `--steps 60`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

Spelling = Callable[[str, object], str]  # (name, value) of a setting → how the reader types it


def as_argument(name: str, value: object) -> str:
    """Spell a setting as a Python argument; the value None means that any value would do.

    A name with a dot is a field of an argument.

    >>> as_argument("seed", 1), as_argument("layers", None), as_argument("targets.steps", 60)
    ('seed=1', 'layers', 'targets with steps=60')
    """
    argument, _, field = name.rpartition(".")
    spelled = field if value is None else f"{field}={value!r}"
    return f"{argument} with {spelled}" if argument else spelled


class RebindError(Exception):
    """Base class of everything that rebind raises."""

    default_code: ClassVar[str] = "error"

    def __init__(
        self,
        problem: str,
        *,
        expected: str = "",
        advice: str = "",
        code: str = "",
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self.args = (problem,)  # not super().__init__, which torch.compile cannot trace
        self.problem = problem
        self.expected = expected
        self.advice = advice
        self.code = code or self.default_code
        self.settings = dict(settings or {})

    def message(self, spell: Spelling = as_argument) -> str:
        """Return the whole message, with every setting in the advice spelled by `spell`."""
        statement = f"{self.problem}; expected {self.expected}" if self.expected else self.problem
        return " ".join(_as_sentence(part) for part in (statement, self.advice_for(spell)) if part)

    def advice_for(self, spell: Spelling = as_argument) -> str:
        """Return the advice alone, with every setting spelled by `spell`."""
        advice = self.advice
        for name, value in self.settings.items():
            advice = advice.replace(f"{{{name}}}", spell(name, value))
        return advice

    def __str__(self) -> str:
        return self.message()


def _as_sentence(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else f"{text}."


def system_error(problem: BaseException) -> RebindError | None:
    """Return the error for memory or a file that another library could not use; None for any other exception."""
    is_cpu_full = type(problem) is RuntimeError and "can't allocate memory" in str(problem)
    if isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError" or is_cpu_full:
        advice = "Use fewer facts at once, a smaller batch, model or dtype, or another device"
        return OutOfMemoryError("Out of memory", advice=advice)
    if isinstance(problem, OSError):
        advice = "Check that it exists, that you have access, and that the disk is not full"
        reason = problem.strerror or problem or type(problem).__name__
        return StorageError(
            f"Cannot use {problem.filename or 'the output'} ({reason})", advice=advice, code="io_failure"
        )
    return None


class InputError(RebindError, ValueError):
    """An argument, a file or a model cannot be used."""

    default_code = "invalid_input"


class ShapeError(InputError):
    """Tensor shapes do not match."""

    default_code = "shape_mismatch"


class UnknownNameError(InputError, LookupError):
    """There is no rule, method, feature map, site or edit with this name."""

    default_code = "unknown_name"


class NumericalError(RebindError, ArithmeticError):
    """The computation has no trustworthy result."""

    default_code = "numerical_failure"


class OutOfMemoryError(RebindError, MemoryError):
    """Even the smallest batch does not fit in memory."""

    default_code = "out_of_memory"


class FieldError(InputError):
    """A field of a request to the studio cannot be used; `field` names it."""

    default_code = "invalid_field"

    def __init__(self, problem: str, *, field: str = "", **details: Any) -> None:
        super().__init__(problem, **details)
        self.field = field


class StorageError(RebindError, OSError):
    """A file or folder could not be written. Nothing half-written remains."""

    default_code = "storage_failure"


class LedgerError(RebindError):
    """A ledger is damaged or in use by another process. Nothing was changed."""

    default_code = "ledger_failure"


class GuardError(RebindError):
    """An edit failed a check and was not written. The model and the ledger are unchanged."""

    default_code = "guard_rejected"
    checks: tuple[str, ...] = ()  # names of the checks that failed, the most serious first


class RebindWarning(UserWarning):
    """Base class of every warning of rebind."""


class NumericalWarning(RebindWarning):
    """A result was found only after a numerical rescue; the message says which one and how large it was."""


class FactWarning(RebindWarning):
    """Facts can be written together, but not all of them exactly as requested."""


class LedgerWarning(RebindWarning):
    """A ledger was read, but some of its files were ignored, or it already has a related edit."""


class MemoryWarning(RebindWarning):
    """Memory ran out; the work continues in smaller batches."""


class CudaGraphWarning(RebindWarning):
    """A computation could not be recorded as a CUDA graph and runs without one, slower."""
