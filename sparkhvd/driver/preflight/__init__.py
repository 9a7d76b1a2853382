"""``preflight``: checks a cluster before a job, and reports what to change."""
