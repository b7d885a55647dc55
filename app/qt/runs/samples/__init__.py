"""The Samples tab: the preview images of a run."""
