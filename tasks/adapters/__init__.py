"""Settings from the environment, and the only code that talks to MLflow or starts Prefect's server."""
