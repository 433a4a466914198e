"""A draft on disk: config.json, model.safetensors and a model card, as vLLM's speculators loader reads them."""
