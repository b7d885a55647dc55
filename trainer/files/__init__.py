"""Reads model files without torch: headers, what a file is, token counts, bundled assets."""
