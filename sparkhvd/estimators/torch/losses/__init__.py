"""Losses and metrics of a torch model, exact over all ranks."""
