"""The history of a run and where it is shown: plots, log files in the Store, TensorBoard and the progress bar."""
