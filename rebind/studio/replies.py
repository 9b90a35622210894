"""What the server answers: JSON, and an error as a sentence that can stand beside a field, never a stack trace."""

from __future__ import annotations

import logging
from typing import Any

from starlette.responses import JSONResponse

from rebind.errors import InputError, RebindError, system_error
from rebind.storage import without_nan

log = logging.getLogger(__name__)

# The field of the form that a problem belongs beside, by the code of its error
FIELDS = {
    "no_subject": "sentence",
    "several_subjects": "sentence",
    "unpaired_brace": "sentence",
    "subject_not_in_prompt": "subject",
    "subject_not_unique": "subject",
    "layers_out_of_range": "layers",
    "too_many_layers": "layers",
}
# What a setting that an advice names is called on the page
LABELS = {
    "force": "“Write it anyway”",
    "method": "the method",
    "steps": "the search steps",
    "layers": "the layers",
    "memory": "the dense memory",
}


def reply(data: Any, status: int = 200) -> JSONResponse:
    """Return JSON; NaN and infinities, which JSON does not know, become null."""
    return JSONResponse(without_nan(data), status)


def problem(error: BaseException, status: int | None = None) -> JSONResponse:
    """Return an error as JSON: {problem, expected, advice, code, field}."""
    usual = 400 if isinstance(error, InputError) else 409 if isinstance(error, RebindError) else 500
    return reply(describe(error), status or usual)


def describe(error: BaseException, field: str = "") -> dict[str, Any]:
    """Return the fields of an error. What was not expected is logged in full, and named in one sentence."""
    rebind_error = as_rebind_error(error)
    if rebind_error is not error:
        log.error("unexpected error", exc_info=error)
    return {
        "problem": rebind_error.problem,
        "expected": rebind_error.expected,
        "advice": rebind_error.advice_for(as_label),
        "code": rebind_error.code,
        "field": field or getattr(rebind_error, "field", "") or FIELDS.get(rebind_error.code, ""),
    }


def as_label(name: str, value: object) -> str:
    """Spell a setting as the page names it.

    >>> as_label("force", True), as_label("method", "dense"), as_label("seed", None)
    ('“Write it anyway”', 'the method dense', 'seed')
    """
    label = LABELS.get(name, name)
    return label if value is None or value is True else f"{label} {value}"


def as_rebind_error(error: BaseException) -> RebindError:
    """Describe any exception by the fields of a RebindError."""
    rebind_error = error if isinstance(error, RebindError) else system_error(error)
    if rebind_error is not None:
        return rebind_error
    advice = "The terminal that runs the studio shows the details"
    return RebindError(f"Unexpected {type(error).__name__}", advice=advice, code="internal_error")
