"""Read jobs from the YAML files of ostris's ai-toolkit."""
