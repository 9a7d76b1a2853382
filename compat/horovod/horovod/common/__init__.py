"""Modules that Horovod's frameworks share."""
