"""The border between the processes: run directories, events and commands. Standard library only."""
