"""The caption editor: tag chips, free text, bulk edits and recovery."""
