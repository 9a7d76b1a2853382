"""Runs in a Store: their identity, the lease of the fit that trains one, and the check before one is resumed."""
