"""The only place that knows vLLM."""
