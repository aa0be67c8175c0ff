"""Safetensors files: an 8-byte length, a JSON header, and packed row-major data without holes."""
