"""What the backends share: connections, retries, credentials, and files that are read by ranges."""
