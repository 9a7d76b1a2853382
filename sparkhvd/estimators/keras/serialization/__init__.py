"""The user's Keras objects as bytes: packages for the ranks, the files of a model, canonical forms for identities."""
