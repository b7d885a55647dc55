"""The caption editor: tag chips and free text, edits of many captions, and recovery."""
