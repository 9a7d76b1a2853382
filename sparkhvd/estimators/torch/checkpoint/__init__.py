"""Training state that ``state_dict`` omits: frozen and pruned parameters, attributes, and random generators."""
