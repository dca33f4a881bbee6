"""Validation of checkpoints in the background, while the training continues."""
