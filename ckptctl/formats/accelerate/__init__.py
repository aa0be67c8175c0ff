"""Accelerate: the folders of save_state."""
