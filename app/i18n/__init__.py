"""Translations of the app. English also has a file, which holds singular and plural forms."""
