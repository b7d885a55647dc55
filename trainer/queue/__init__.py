"""Queue worker, which starts engines for queued jobs, and the engine's side of a queue entry."""
