"""The app's words in other languages. English has a file too: its plural forms."""
