"""One file a backend; `hs_connectors.registry` knows them by name."""
