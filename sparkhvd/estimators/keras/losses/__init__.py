"""Losses and metrics of a Keras model, exact over all ranks."""
