"""The fixtures of the editing tests: tiny models and a separate cache."""

from tests.edit.conftest import *  # noqa: F403
