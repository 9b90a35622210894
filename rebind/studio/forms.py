"""The fields of a request, checked: each method returns a value or raises a FieldError that names the field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from rebind.errors import FieldError

LONGEST_TEXT = 4_000


class Form:
    """The JSON object of a POST request, or the parameters of a GET request."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields

    @classmethod
    async def of(cls, request: Request) -> Form:
        """Read the fields of a request."""
        if request.method != "POST":
            return cls(dict(request.query_params))
        try:
            body = json.loads(await request.body() or b"{}")
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            raise FieldError("The request is not valid JSON", field="", expected="a JSON object", code="invalid_json")
        return cls(body)

    def text(self, name: str, default: str | None = None, *, longest: int = LONGEST_TEXT) -> str:
        """Return a text without spaces around it; without a default it must not be empty."""
        value = self.fields.get(name)
        value = "" if value is None else value
        if default is not None and isinstance(value, str) and not value.strip():
            return default
        if not isinstance(value, str) or not value.strip():
            raise FieldError(f"{_label(name)} is empty", field=name, advice="Type some text", code="empty_field")
        if len(value) > longest:
            expected = f"at most {longest:,} characters"
            raise FieldError(f"{_label(name)} is too long", field=name, expected=expected, code="too_long")
        if value != printable(value):
            raise FieldError(f"{_label(name)} has control characters", field=name, code="control_characters")
        return value.strip()

    def number(self, name: str, default: float, *, low: float, high: float) -> float:
        """Return a number between two bounds."""
        value = self.fields.get(name, default)
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not low <= number <= high:
            expected = f"a number from {low:g} to {high:g}"
            raise FieldError(f"{_label(name)} is {value!r:.40}", field=name, expected=expected, code="out_of_range")
        return number

    def integer(self, name: str, default: int, *, low: int, high: int) -> int:
        """Return a whole number between two bounds."""
        number = self.number(name, default, low=low, high=high)
        if number != int(number):
            raise FieldError(f"{_label(name)} is {number}", field=name, expected="a whole number", code="out_of_range")
        return int(number)

    def flag(self, name: str) -> bool:
        """Return whether a switch is on; it is off if it is missing."""
        value = self.fields.get(name, False)
        if value in (True, "true", "1"):
            return True
        if value in (False, "false", "0", "", None):
            return False
        raise FieldError(f"{_label(name)} is {value!r:.40}", field=name, expected="true or false", code="not_a_flag")

    def layers(self) -> tuple[int, ...] | None:
        """Return the layers in a text such as "2, 3, 4"; None if there is none."""
        text = self.text("layers", "", longest=400)
        numbers = text.replace(",", " ").split()
        if not all(number.isascii() and number.isdecimal() and len(number) < 5 for number in numbers):
            expected = "numbers such as 2, 3, 4"
            raise FieldError(
                f"{text!r:.80} is not a list of layers", field="layers", expected=expected, code="invalid_layers"
            )
        return tuple(sorted({int(number) for number in numbers})) or None

    def choice(self, name: str, choices: Mapping[str, Any] | list[str] | tuple[str, ...], default: str) -> str:
        """Return one of some names."""
        value = self.fields.get(name, default)
        if value not in list(choices):
            expected = ", ".join(choices)
            raise FieldError(f"{_label(name)} is {value!r:.40}", field=name, expected=expected, code="unknown_choice")
        return str(value)


def _label(name: str) -> str:
    return f"The {name.replace('_', ' ')}"


def printable(text: str) -> str:
    """Return a text without control characters and halves of characters, both of which a model may say.

    >>> printable("a\\x07b\\n")
    'ab\\n'
    """
    return "".join(char for char in text if (char >= " " or char in "\t\n\r") and not "\ud800" <= char <= "\udfff")
