"""Translations of the app. English has a file too, for singular and plural forms."""
