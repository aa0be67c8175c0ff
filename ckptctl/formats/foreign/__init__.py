"""Checkpoints of frameworks that this version recognises and does not read."""
