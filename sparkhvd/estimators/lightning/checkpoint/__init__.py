"""The state that a run resumes from, in addition to Lightning's own checkpoint."""
