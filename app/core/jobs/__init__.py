"""Job files as the Train page edits them: each change checked at once, on disk at once, and undone where wanted."""
