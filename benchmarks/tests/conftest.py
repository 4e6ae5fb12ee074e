"""The default suite, which has none of these tests, does not import them: see tests/unit/conftest.py."""

from tests.unit.conftest import pytest_ignore_collect

__all__ = ["pytest_ignore_collect"]
