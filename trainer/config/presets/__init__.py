"""Presets: files in which artists share a recipe, fit settings, or both; their content is untrusted."""
