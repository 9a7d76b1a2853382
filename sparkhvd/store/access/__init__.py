"""The common parts of the backends: connections, retries, credentials, and files that are read by ranges."""
