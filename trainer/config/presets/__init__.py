"""Presets: files that carry a recipe, a fit, or both from artist to artist; everything in them is untrusted."""
