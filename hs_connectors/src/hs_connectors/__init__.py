"""Hidden states from vLLM to a reader, record by record."""
