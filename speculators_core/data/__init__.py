"""Conversations to token rows with loss masks, and the ways in which a verifier makes its own conversations."""
