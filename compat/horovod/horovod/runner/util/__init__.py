"""Helpers of Horovod's launcher that programs import."""
