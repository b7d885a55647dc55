"""Query language of the image filter, and saved filters."""
