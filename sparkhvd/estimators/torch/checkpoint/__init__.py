"""State of a training beyond what ``state_dict`` holds: what is frozen or pruned, and random generators."""
