"""What the processes share: run directories, events, commands and the queue. Standard library only."""
