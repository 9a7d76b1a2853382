"""The user's functions and modules on their way to the executors."""
