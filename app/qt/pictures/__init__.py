"""The Pictures page: everything that happens to a dataset before training."""
