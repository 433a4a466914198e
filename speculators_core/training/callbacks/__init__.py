"""What happens around the training loop now and then: logging, progress, validation, checkpoints, signals."""
