"""Folders that Transformers' Trainer saves and resumes from: `checkpoint-N/`."""
