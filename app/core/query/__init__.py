"""The language in which pictures are found, and the filters that are kept."""
