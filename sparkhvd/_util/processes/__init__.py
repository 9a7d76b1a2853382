"""The processes of a machine: their identities, forks and file descriptors, and locks between them."""
