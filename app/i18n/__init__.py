"""Translations of the app. English has a file too, for its singular and plural forms."""
