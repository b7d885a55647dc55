"""The Images page: viewing, culling, captioning and checking a dataset before training."""
