"""The data model: frozen dataclasses and pure functions of them. Imports the standard library and NumPy only."""
