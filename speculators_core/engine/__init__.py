"""Start, await, talk to and stop a vLLM server of a given runtime; read its counters. Never imports vllm."""
