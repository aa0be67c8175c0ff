"""Hugging Face folders: weights in one file or several, their index, config.json, and what lies beside them."""
