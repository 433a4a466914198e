"""The library behind draftsmith: no Prefect, no MLflow, no vLLM."""
