"""Watch runs: the list of runs, their states, and the events and curves of each run."""
