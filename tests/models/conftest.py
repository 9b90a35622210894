"""The fixtures of the editing tests: tiny models and a cache of their own."""

from tests.edit.conftest import *  # noqa: F403
