"""The launchers, each a way to start the ranks of a job; they do not import each other."""
