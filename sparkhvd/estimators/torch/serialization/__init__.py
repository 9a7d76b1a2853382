"""PyTorch objects of the user as bytes: pickles for the ranks, the files of a model, an identity's canonical form."""
