"""Pictures and captions: what a dataset holds, what is wrong with it, and what each step of a run sees of it."""
