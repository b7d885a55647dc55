"""Model files without torch: headers, identification, token counts, bundled assets."""
