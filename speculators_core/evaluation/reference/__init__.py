"""Speculative decoding in plain PyTorch: a Hugging Face verifier, any of our drafts, no engine.

verifier.py   the verifier, fed a few tokens at a time and able to forget the last ones
decoding.py   the loop: draft, verify, accept or correct
measuring.py  its acceptance as a measured run, where no engine can serve the draft
"""
