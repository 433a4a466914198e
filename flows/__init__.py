"""The pipeline's story: verbs in order."""
