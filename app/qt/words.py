"""Marks words of tables for translation; see app.core.words."""

from app.core.words import QT_TRANSLATE_NOOP

__all__ = ["QT_TRANSLATE_NOOP"]
