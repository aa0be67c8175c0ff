"""What `validate` can find: rules as data (rules.toml), and findings. Nothing is read or checked here."""

from ckptctl.rules.finding import Finding, Said, Where, finding, from_error
from ckptctl.rules.registry import SEVERITIES, Rule, by_kind, known_words, rules

__all__ = ["SEVERITIES", "Finding", "Rule", "Said", "Where", "by_kind", "finding", "from_error", "known_words", "rules"]
