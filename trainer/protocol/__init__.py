"""Define what Impasto's processes share: run directories, events, commands, the queue. Standard library only."""
