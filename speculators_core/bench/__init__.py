"""Measurements of our own speed, beside what it is compared with."""
