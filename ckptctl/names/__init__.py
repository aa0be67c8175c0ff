"""Naming as data: TOML files, and the functions that read them. No Python per model family."""

from ckptctl.names.families import NAMESPACES, Family, Namespace, Parameter, family, known
from ckptctl.names.megatron import megatron, megatron_arguments
from ckptctl.names.natives import in_memory, looks_like_torchtitan, torchtitan
from ckptctl.names.quantized import quantized_by_names
from ckptctl.names.ties import absent_head, head_and_embedding, is_tied

__all__ = [
    "NAMESPACES",
    "Family",
    "Namespace",
    "Parameter",
    "absent_head",
    "family",
    "head_and_embedding",
    "in_memory",
    "is_tied",
    "known",
    "looks_like_torchtitan",
    "megatron",
    "megatron_arguments",
    "quantized_by_names",
    "torchtitan",
]
