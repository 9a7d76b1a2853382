"""Reuse of prepared rows: their fingerprints and names, the leases on them, and their removal."""
