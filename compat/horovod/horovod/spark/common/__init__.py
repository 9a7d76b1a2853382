"""Modules that Horovod's estimators share."""
