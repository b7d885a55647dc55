"""Works the queue off: the worker, which starts engines, and what an engine does for its entry."""
