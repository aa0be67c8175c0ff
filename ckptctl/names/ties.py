"""Which weights a config ties, by names and by the defaults of families (ties.toml)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckptctl.names.table import table


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether a config.json says that the head is the embedding.

    By its own word, its text model's, or its family's default.
    """
    text = config.get("text_config")
    for scope in (config, text if isinstance(text, Mapping) else {}):
        value = scope.get("tie_word_embeddings")
        if isinstance(value, bool):
            return value
    return config.get("model_type") in table("ties")["tied_by_default"]


def head_and_embedding(names: Iterable[str]) -> tuple[str, str] | None:
    """(head, embedding) among a model's names: the pair that `tie_word_embeddings` ties.

    None where either is not there.
    """
    known = list(names)
    for head in table("ties")["heads"]:
        for name in known:
            if name != head and not name.endswith("." + head):
                continue
            prefix = name[: -len(head)]
            for embedding in table("ties")["embeddings"]:
                found = next((n for n in (prefix + embedding, embedding) if n in known), None)
                if found is not None:
                    return name, found
    return None


def absent_head(names: Iterable[str], config: Mapping[str, Any]) -> tuple[str, str] | None:
    """(head, embedding) where the config ties them and only the embedding is stored.

    None where there is no head to be had.

    Models for other tasks (classification, embedding) have no head to tie: their architecture, or a head of their own,
    says so.
    """
    known = set(names)
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures:
        with_head = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
        if not any(str(a).endswith(with_head) for a in architectures):
            return None
    if (
        not is_tied(config)
        or head_and_embedding(known) is not None
        or any(n.split(".")[0] in ("score", "classifier", "qa_outputs") for n in known)
    ):
        return None
    for embedding, head in table("ties")["head_of"].items():
        if embedding in known and head not in known:
            return head, embedding
    return None
