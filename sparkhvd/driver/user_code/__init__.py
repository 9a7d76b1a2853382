"""Sends the user's functions and modules to the executors."""
