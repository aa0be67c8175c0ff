"""Naming as data: TOML files, and the functions that read them. No Python per model family."""

from ckptctl.names.families import Family, Namespace, Parameter, family, known
from ckptctl.names.quantized import quantized_by_names
from ckptctl.names.ties import absent_head, head_and_embedding, is_tied

__all__ = [
    "Family",
    "Namespace",
    "Parameter",
    "absent_head",
    "family",
    "head_and_embedding",
    "is_tied",
    "known",
    "quantized_by_names",
]
