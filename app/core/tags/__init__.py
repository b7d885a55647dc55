"""Tags: splitting captions, counting tags, and completing the tag that is being typed."""
