"""Tags: taking captions apart, counting them, and proposing the one that somebody is about to type."""
