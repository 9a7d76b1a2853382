"""Distributed Keras 3: ``import sparkhvd.keras as hvd``."""
