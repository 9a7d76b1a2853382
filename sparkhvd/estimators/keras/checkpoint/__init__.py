"""The training state that a run resumes from and that Keras does not save: callbacks, buffers, random generators."""
