"""What happens to a draft after it was measured: the gate, and promotion behind it."""
