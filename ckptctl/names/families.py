"""Model families: the parameters of a model by its config, as data in families/*.toml. No Python per family.

A family's file lists parameters in registration order (the order of `named_parameters()`, by which optimizers number
them), for three namespaces: `module5` and `module4` are the names in memory under Transformers 5 and 4, `disk` those in
files that `save_pretrained` writes.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

from ckptctl.core.errors import Damaged
from ckptctl.names.expression import NoNumber, value_of
from ckptctl.names.ties import is_tied

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Namespace = Literal["module5", "module4", "disk"]
NAMESPACES: tuple[Namespace, ...] = ("module5", "module4", "disk")
_PARAMETER_LIMIT = 300_000
_SHAPE_LIMIT = 1 << 40


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a model, or a buffer that is saved.

    decays: whether weight decay is usual for it (no bias, no norm). stacks names the tensors of the `disk` namespace
    that it is made of: for each expert in turn, their rows one after the other; () where it is one tensor there too.
    Source: transformers 5.24.0, trainer.py, get_decay_parameter_names.
    """

    name: str
    shape: tuple[int, ...]
    decays: bool = True
    stacks: tuple[tuple[str, ...], ...] = ()
    disk: str = ""
    """Its name on disk, "" for one that stands for several tensors there."""


@dataclass(frozen=True)
class Family:
    """A family with the sizes of one config."""

    name: str
    config: Mapping[str, Any]

    @cached_property
    def sizes(self) -> Mapping[str, Any]:
        """The config's keys, and over them the sizes that the family's file gives names to."""
        names: dict[str, Any] = {**self.config, "tied": is_tied(self.config), "true": True}
        for name, text in _file(self.name)["sizes"].items():
            names[name] = self._said(text, names)
        return names

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by their text: they are of the config's numbers alone, the same in every layer."""
        return {}

    def parameters(self, namespace: Namespace = "module5") -> tuple[Parameter, ...]:
        """Every parameter in registration order, tied ones once, under their first name.

        Damaged where the config's numbers make no model.
        """
        return tuple(p for p, is_buffer, is_extra in self._all(namespace) if not is_buffer and not is_extra)

    def buffers(self, namespace: Namespace = "module5") -> tuple[Parameter, ...]:
        """Buffers that are saved."""
        return tuple(p for p, is_buffer, is_extra in self._all(namespace) if is_buffer and not is_extra)

    def extras(self) -> tuple[Parameter, ...]:
        """What some files hold on disk beyond the model: layers that Transformers skips."""
        return tuple(p for p, _, is_extra in self._all("disk") if is_extra)

    def _all(self, namespace: Namespace) -> Iterator[tuple[Parameter, bool, bool]]:
        items = self._expanded(_file(self.name)["parameters"], namespace, dict(self.sizes), False)
        for count, (item, names, is_extra) in enumerate(items):
            if count >= _PARAMETER_LIMIT:
                raise self._damaged(f"its model would have more than {_PARAMETER_LIMIT} parameters")
            yield self._parameter(item, namespace, names), bool(item.get("buffer")), is_extra

    def _expanded(
        self, items: list[dict[str, Any]], namespace: Namespace, names: dict[str, Any], is_extra: bool
    ) -> Iterator[tuple[dict[str, Any], dict[str, Any], bool]]:
        """Items whose conditions hold, with the loop variables of the blocks around them."""
        for item in items:
            if namespace not in item.get("only", NAMESPACES):
                continue
            if "when" in item and not self._said(item["when"], names):
                continue
            if "parameters" not in item:
                yield item, names, is_extra
                continue
            start = self._size(item.get("start", "0"), names)
            for i in range(start, start + self._size(item["count"], names)):
                names[item["each"]] = i
                yield from self._expanded(item["parameters"], namespace, names, is_extra or bool(item.get("extra")))
            names.pop(item["each"], None)

    def _parameter(self, item: dict[str, Any], namespace: Namespace, names: dict[str, Any]) -> Parameter:
        shape = self._shapes.get(item["shape"])
        if shape is None:
            shape = tuple(self._size(s, names) for s in item["shape"].split(","))
            self._shapes[item["shape"]] = shape
        stacks: tuple[tuple[str, ...], ...] = ()
        if "stacks" in item:
            stacks = tuple(tuple(_filled(s, {**names, "e": e}) for s in item["stacks"]) for e in range(shape[0]))
        decays = item.get("decays", len(shape) > 1)
        name = _filled(item.get(namespace, item["name"]), names)
        same = namespace not in item and "disk" not in item
        disk = name if same else _filled(item.get("disk", item["name"]), names)
        return Parameter(name, shape, decays, stacks, "" if stacks else disk)

    def _size(self, text: str, names: Mapping[str, Any]) -> int:
        found = self._said(text, names)
        if type(found) is not int or not 0 <= found < _SHAPE_LIMIT:
            raise self._damaged(f"{text.strip()} is {found!r}, which is no size")
        return found

    def _said(self, text: str, names: Mapping[str, Any]) -> Any:
        try:
            return value_of(text, names)
        except NoNumber as err:
            raise self._damaged(str(err)) from err

    def _damaged(self, why: str) -> Damaged:
        return Damaged(
            f"the config does not describe a {self.name} model", why=why, fix="check config.json", code="config-numbers"
        )


def family(config: Mapping[str, Any]) -> Family | None:
    """The family of a config.json, None where none is known here.

    None too for the family's models for other tasks (classification, ...) and for variants with other parameters.
    """
    name = _by_type().get(str(config.get("model_type")))
    if name is None:
        return None
    found = _file(name)
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures and architectures[0] not in found["architectures"]:
        return None
    if any(value_of(text, config) for text in found.get("unless", [])):
        return None
    return Family(name, config)


def _filled(text: str, names: Mapping[str, Any]) -> str:
    for variable in ("{l}", "{e}"):
        if variable in text:
            text = text.replace(variable, str(names[variable[1]]))
    return text


@cache
def _folder() -> dict[str, str]:
    found = files(__package__ or "ckptctl.names").joinpath("families")
    return {f.name.removesuffix(".toml"): f.read_text(encoding="utf-8") for f in found.iterdir()}


def known() -> tuple[str, ...]:
    """The families there are."""
    return tuple(sorted(_folder()))


@cache
def _file(name: str) -> dict[str, Any]:
    return tomllib.loads(_folder()[name])


@cache
def _by_type() -> dict[str, str]:
    return {t: name for name in known() for t in _file(name)["model_types"]}
