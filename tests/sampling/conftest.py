"""Fixtures of other folders."""

from __future__ import annotations

from tests.text.conftest import byte_level, model_folder

__all__ = ["byte_level", "model_folder"]
