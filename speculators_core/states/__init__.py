"""Hidden-state sets: capture by vLLM or a Hugging Face forward, shards, reading, and the peer's layout."""
