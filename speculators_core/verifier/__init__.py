"""What the rest of the library needs to know of a verifier: facts, head and norm by key, fingerprint."""
