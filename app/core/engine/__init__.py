"""How the app speaks to the engine: processes of `python -m trainer`, nothing else."""
