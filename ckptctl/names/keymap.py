"""Key maps: a user's own rules from the names and shapes that a checkpoint has to those that are wanted. Pure.

A rule is a kind (rename, split, concat, transpose, permute) and patterns: `{x}` stands for a part of a name without
dots, `{x*}` for any text. Rules become the recipes of `core.remake`; docs/key-map.md shows them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptctl.core.errors import Usage
from ckptctl.core.remake import Recipe, Taken, whole
from ckptctl.core.tensor import Key, Part

Shape = tuple[int, ...]
KEYS: dict[str, frozenset[str]] = {
    "rename": frozenset({"from", "to"}),
    "split": frozenset({"from", "to", "axis", "sizes"}),
    "concat": frozenset({"from", "to", "axis"}),
    "transpose": frozenset({"from", "to"}),
    "permute": frozenset({"from", "to", "view", "axes", "shape"}),
}
"""The kinds of rules, and the keys that each takes."""
_VARIABLE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(\*?)\}")


@dataclass(frozen=True)
class Rule:
    """One rule. sources and targets are patterns of names; options what else its table says."""

    kind: str
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    options: Mapping[str, Any]
    number: int

    def __str__(self) -> str:
        return f"{self.kind} {self.number} ({self.sources[0]})"


@dataclass(frozen=True)
class KeyMap:
    """All rules of a file. keep: names that no rule maps stay as they are."""

    rules: tuple[Rule, ...]
    keep: bool
    origin: str


def key_map(data: Mapping[str, Any], origin: str) -> KeyMap:
    """The rules of a file's data. Usage for a kind, key or pattern that is not known."""
    unknown = [k for k in data if k not in (*KEYS, "unmapped")]
    if unknown:
        raise _wrong(origin, f"there is no rule {unknown[0]!r}", f"rules are {', '.join(KEYS)}; and unmapped")
    unmapped = data.get("unmapped", "refuse")
    if unmapped not in ("refuse", "keep"):
        raise _wrong(origin, f"unmapped is {unmapped!r}", "it is refuse or keep")
    rules = []
    for kind in KEYS:
        tables = data.get(kind, [])
        if not isinstance(tables, list):
            raise _wrong(origin, f"{kind} is no list of tables", f"write [[{kind}]] before each rule")
        rules += [_rule(kind, number, table, origin) for number, table in enumerate(tables, 1)]
    if not rules:
        raise _wrong(origin, "there is no rule in it", f"rules are {', '.join(KEYS)}")
    return KeyMap(tuple(rules), unmapped == "keep", origin)


def _wrong(origin: str, why: str, fix: str) -> Usage:
    return Usage(f"--key-map {origin}: {why}", fix=fix, code="key-map")


def _rule(kind: str, number: int, table: Any, origin: str) -> Rule:
    where = f"{kind} {number}"
    if not isinstance(table, Mapping):
        raise _wrong(origin, f"{where} is no table", "give it from and to")
    unknown = sorted(set(table) - KEYS[kind])
    if unknown:
        raise _wrong(origin, f"{where} has the key {unknown[0]!r}", f"its keys are {', '.join(sorted(KEYS[kind]))}")
    sources, targets = (_texts(table.get(k), f"{k} of {where}", origin) for k in ("from", "to"))
    many = {"split": "to", "concat": "from"}.get(kind)
    for key, found in (("from", sources), ("to", targets)):
        if (len(found) > 1) != (key == many):
            raise _wrong(origin, f"{key} of {where} names {len(found)}", _counts(kind))
    bound = set(_variables(sources[0]))
    for pattern in (*sources[1:], *targets):
        if set(_variables(pattern)) != bound:
            raise _wrong(
                origin, f"{pattern!r} of {where} has other variables than {sources[0]!r}", "use the same in all"
            )
    options = {k: v for k, v in table.items() if k not in ("from", "to")}
    _options(kind, options, where, origin)
    return Rule(kind, sources, targets, options, number)


def _counts(kind: str) -> str:
    return {"split": "one name, to several", "concat": "several names, to one"}.get(kind, "one name, to one")


def _texts(value: Any, what: str, origin: str) -> tuple[str, ...]:
    found = value if isinstance(value, list) else [value]
    if not found or not all(isinstance(v, str) and v for v in found):
        raise _wrong(origin, f"{what} is {value!r}", "give a name, or a list of names")
    for text in found:
        if "{" in _VARIABLE.sub("", text) or "}" in _VARIABLE.sub("", text):
            raise _wrong(origin, f"{what}: {text!r} is no pattern", "variables are {x} and {x*}")
    return tuple(found)


def _variables(pattern: str) -> list[str]:
    return [m[1] for m in _VARIABLE.finditer(pattern)]


def _options(kind: str, options: Mapping[str, Any], where: str, origin: str) -> None:
    axis = options.get("axis", 0)
    if type(axis) is not int or axis < 0:
        raise _wrong(origin, f"axis of {where} is {axis!r}", "an axis counts from 0")
    for key in ("sizes", "view", "axes", "shape"):
        value = options.get(key)
        if value is not None and not (isinstance(value, list) and value and all(type(n) is int for n in value)):
            raise _wrong(origin, f"{key} of {where} is {value!r}", "give a list of whole numbers")
    if kind == "permute":
        view, axes = options.get("view"), options.get("axes")
        if view is None or axes is None or sorted(axes) != list(range(len(view))):
            raise _wrong(
                origin, f"{where} needs view and axes, an order of its axes", "for example [4, 8, 2, 64], [0, 2, 1, 3]"
            )
        if sum(n == -1 for n in view) > 1 or any(n < 1 and n != -1 for n in view):
            raise _wrong(origin, f"view of {where} is {view}", "sizes from 1; one of them may be -1")


# ---- rules over a checkpoint's names --------------------------------------------------------------------------------


def recipes_of(rules: KeyMap, shapes: Mapping[str, Shape]) -> list[Recipe]:
    """Recipes for a checkpoint with those names and shapes.

    Usage where a rule matches nothing, two rules match one name, a rule does not fit a shape, or (unless the map keeps
    them) names are matched by none: all of these are listed.
    """
    out: list[Recipe] = []
    owner: dict[str, Rule] = {}
    for rule in rules.rules:
        before = len(out)
        for bound in _bindings(rule, shapes):
            olds = [_filled(s, bound) for s in rule.sources]
            absent = [n for n in olds if n not in shapes]
            if absent:
                raise _wrong(
                    rules.origin, f"{rule} needs {absent[0]}, which is not there", "see the names with `ckptctl ls`"
                )
            for name in olds:
                if name in owner and owner[name] is not rule:
                    raise _wrong(
                        rules.origin, f"{name} is matched by {owner[name]} and {rule}", "let one of them match"
                    )
                owner[name] = rule
            out += _recipes(rule, olds, [_filled(t, bound) for t in rule.targets], shapes, rules.origin)
        if len(out) == before:
            raise _wrong(rules.origin, f"{rule} matches no name", "see the names with `ckptctl ls`")
    unmapped = [n for n in shapes if n not in owner]
    if unmapped and not rules.keep:
        raise Usage(
            f"--key-map {rules.origin}: no rule maps {len(unmapped)} names",
            why=", ".join(unmapped),
            fix='map them too, or write unmapped = "keep" at the top',
            code="key-map-unmapped",
        )
    return out


def _bindings(rule: Rule, shapes: Mapping[str, Shape]) -> list[dict[str, str]]:
    """What the variables stand for in each name that the first pattern matches, and in those that only others do."""
    found: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}
    for pattern in rule.sources:
        regex = _regex(pattern)
        for name in shapes:
            match = regex.fullmatch(name)
            if match:
                found.setdefault(tuple(sorted(match.groupdict().items())), match.groupdict())
    return list(found.values())


def _regex(pattern: str) -> re.Pattern[str]:
    out, at, seen = "", 0, set()
    for m in _VARIABLE.finditer(pattern):
        out += re.escape(pattern[at : m.start()])
        out += f"(?P={m[1]})" if m[1] in seen else f"(?P<{m[1]}>{'.+' if m[2] else '[^.]+'})"
        seen.add(m[1])
        at = m.end()
    return re.compile(out + re.escape(pattern[at:]))


def _filled(pattern: str, bound: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda m: bound[m[1]], pattern)


def _recipes(
    rule: Rule, olds: Sequence[str], news: Sequence[str], shapes: Mapping[str, Shape], origin: str
) -> list[Recipe]:
    shape = shapes[olds[0]]
    if rule.kind == "rename":
        return [Recipe(news[0], shape, (Taken(olds[0], shape, whole(news[0], shape)),))]
    if rule.kind == "transpose":
        if len(shape) != 2:
            raise _wrong(origin, f"{rule}: {olds[0]} is {shape}", "transpose is for two axes; permute for others")
        return [_permuted(olds[0], news[0], shape, shape, (1, 0), (shape[1], shape[0]))]
    if rule.kind == "permute":
        return [_permute(rule, olds[0], news[0], shape, origin)]
    axis = rule.options.get("axis", 0)
    cut = [shapes[o] for o in olds]
    if any(len(s) != len(shape) or axis >= len(s) for s in cut):
        raise _wrong(origin, f"{rule}: axis {axis} of shapes {cut}", "give an axis that all have")
    if any(s[:axis] + s[axis + 1 :] != shape[:axis] + shape[axis + 1 :] for s in cut):
        raise _wrong(origin, f"{rule}: shapes {cut} differ on other axes than {axis}", "check the names and the axis")
    if rule.kind == "concat":
        return [_concat(olds, news[0], cut, axis)]
    return _split(rule, olds[0], news, shape, axis, origin)


def _concat(olds: Sequence[str], new: str, shapes: Sequence[Shape], axis: int) -> Recipe:
    total = sum(s[axis] for s in shapes)
    result = (*shapes[0][:axis], total, *shapes[0][axis + 1 :])
    taken, at = [], 0
    for old, shape in zip(olds, shapes, strict=True):
        lo = tuple(at if i == axis else 0 for i in range(len(shape)))
        part = Part(Key(new), shape, (0,) * len(shape), shape, result, lo, tuple(range(len(shape))))
        taken.append(Taken(old, shape, part))
        at += shape[axis]
    return Recipe(new, result, tuple(taken))


def _split(rule: Rule, old: str, news: Sequence[str], shape: Shape, axis: int, origin: str) -> list[Recipe]:
    sizes = rule.options.get("sizes")
    if sizes is None:
        if shape[axis] % len(news):
            raise _wrong(
                origin, f"{rule}: {old} has {shape[axis]} on axis {axis}, for {len(news)} equal parts", "give sizes"
            )
        sizes = [shape[axis] // len(news)] * len(news)
    if len(sizes) != len(news) or sum(sizes) != shape[axis] or any(n < 0 for n in sizes):
        raise _wrong(
            origin, f"{rule}: sizes {sizes} of {old}, which has {shape[axis]} on axis {axis}", "one size a name"
        )
    out, at = [], 0
    for new, size in zip(news, sizes, strict=True):
        part_shape = (*shape[:axis], size, *shape[axis + 1 :])
        lo = tuple(at if i == axis else 0 for i in range(len(shape)))
        part = Part(Key(new), shape, lo, part_shape, part_shape, (0,) * len(shape), tuple(range(len(shape))))
        out.append(Recipe(new, part_shape, (Taken(old, shape, part),)))
        at += size
    return out


def _permute(rule: Rule, old: str, new: str, shape: Shape, origin: str) -> Recipe:
    view, axes = list(rule.options["view"]), tuple(rule.options["axes"])
    numel, known = math.prod(shape), math.prod(n for n in view if n != -1)
    if -1 in view:
        view[view.index(-1)] = numel // known
    result = tuple(rule.options.get("shape") or shape)
    if math.prod(view) != numel or math.prod(result) != numel:
        raise _wrong(
            origin,
            f"{rule}: view {rule.options['view']} of {old}, which is {shape}",
            "they must count the same elements",
        )
    return _permuted(old, new, shape, tuple(view), axes, result)


def _permuted(old: str, new: str, shape: Shape, view: Shape, axes: Shape, result: Shape) -> Recipe:
    """New axis i of the view is old axis axes[i], as NumPy's transpose says it."""
    hub = tuple(view[a] for a in axes)
    to = tuple(axes.index(i) for i in range(len(view)))
    part = Part(Key(new), view, (0,) * len(view), view, hub, (0,) * len(view), to)
    return Recipe(new, result, (Taken(old, shape, part),))


__all__ = ["KEYS", "KeyMap", "Rule", "key_map", "recipes_of"]
