"""Recovery from out-of-memory errors: retry, then continue under a smaller plan."""
