"""Keras objects of the user as bytes: packages for the ranks, the files of a model, an identity's canonical form."""
