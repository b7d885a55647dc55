"""Translations of the app. English also has a file, for its plural forms."""
