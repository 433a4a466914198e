"""Serve a deployment's champion behind a proxy, follow its alias, and take a version back that disappoints."""
