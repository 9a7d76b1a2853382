"""What Horovod's estimators share."""
