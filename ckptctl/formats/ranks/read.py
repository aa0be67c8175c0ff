"""Reads a set of ranks' torch files as one checkpoint: FSDP2, HSDP, FSDP over TP, FSDP1, verl's folders.

No tensor data is read but steps, and copies where nothing else tells whether they are equal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import Checkpoint, Facts, File, Optimizer
from ckptctl.core.errors import CkptError, Damaged, Unsupported
from ckptctl.core.tensor import Key, Source, Tensor
from ckptctl.core.values import Array, Tree
from ckptctl.formats import Evidence, Hints
from ckptctl.formats.bytesource import read_whole
from ckptctl.formats.datafiles import DataFiles
from ckptctl.formats.hf.config import CONFIG, read_config
from ckptctl.formats.hf.files import scan_folder
from ckptctl.formats.parameters import named_states
from ckptctl.formats.ranks.copies import Copies, read_box
from ckptctl.formats.ranks.files import RankFiles, missing_ranks, rank_files, require_whole
from ckptctl.formats.ranks.flat import Flat, flat_alone, flat_states, from_units, has_units, is_flat_state, ways_of
from ckptctl.formats.ranks.gather import Gathered, aliases
from ckptctl.formats.ranks.joining import Joined
from ckptctl.formats.state import counted, number

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


CONFIGS = "huggingface"
"""verl's folder of config and tokenizer."""
FSDP_CONFIG = "fsdp_config.json"


def detect(path: Path) -> Evidence | None:
    """A folder with files of ranks, by their names."""
    files = rank_files(path) if path.is_dir() else None
    if files is None:
        return None
    return Evidence("torch", f"it holds {files.first}, one rank's file", path)


def read(path: Path, hints: Hints) -> Checkpoint:
    """The checkpoint in a folder of ranks' files, or in one file that is all of its set.

    Raises MissingFile where a rank's file is not there, Damaged where ranks contradict each other, Unsupported where
    the files do not tell how tensors are cut.
    """
    files = rank_files(path) if path.is_dir() else RankFiles({"": {0: ""}})
    if files is None:
        raise Unsupported("the folder holds no files of ranks", where=str(path), fix="give a torch file itself")
    if path.is_dir():
        require_whole(files, str(path))
    found = _Set(path, files)
    for rank in files.ranks:
        found.add(rank)
    return found.checkpoint(hints)


class _Set(Joined):
    """A set that is read, as a checkpoint."""

    flat: Flat | None = None

    def checkpoint(self, hints: Hints) -> Checkpoint:
        """The set as a checkpoint."""
        self._require_ranks()
        own, extras = self._facts()
        facts = hints.facts if hints.facts.config is not None else own
        self.flat = from_units(self.model, facts, str(self.path)) if has_units(self.model) else None
        if self.flat is not None:
            self.model = self.flat.model
        self._require_cut()
        self.ties = aliases(self.model)
        with_copies = DataFiles(self.path if self.path.is_dir() else self.path.parent, self._paths())
        try:
            return self._checkpoint(facts, extras, hints, with_copies)
        finally:
            with_copies.close()

    def _checkpoint(self, facts: Facts, extras: tuple[File, ...], hints: Hints, data: DataFiles) -> Checkpoint:
        copies = Copies(data, hints.replica, hints.verify_replicas)
        tensors: dict[Key, Tensor] = {}
        for name, gathered in self.model.items():
            tensors[Key(name)] = self._tensor(Key(name), gathered, copies)
        optimizer, states = self._named(facts, hints) if self.found.has_optimizer else (None, {})
        for (name, kind), value in states.items():
            if isinstance(value, Gathered):
                tensors[Key(name, kind)] = self._tensor(Key(name, kind), value, copies)
        if copies.unread:
            self.warnings.append(
                f"{copies.unread} parts that several ranks hold were not compared: they are large, and have no "
                "checksum; --verify-replicas does"
            )
        if copies.differing:
            key, where = next(iter(copies.differing.items()))
            self.warnings.append(
                f"{len(copies.differing)} tensors differ between ranks, {key.name} ({key.kind}) in {where}: the "
                f"{hints.replica} rank's copy is taken (--replica)"
            )
        values = self.values.done()
        return Checkpoint(
            "torch",
            "verl" if self.files.is_verl else "fsdp1" if self.flat is not None else "ranks",
            str(self.path),
            tuple(Source(n) for n in self.names),
            {**tensors, **self.tensors},
            optimizer,
            values,
            self.model_values.done(),
            self.ties,
            facts,
            {"world_size": len(self.files.ranks)},
            self._step(values, states, data),
            (*self.sizes, *extras),
            tuple(f.path for f in extras if f.role == "extra"),
            extras_root=CONFIGS if extras else "",
            unsafe=tuple(self.unsafe),
            unknown_globals=tuple(self.unknown),
            unsupported=tuple(self.unsupported),
            warnings=tuple(self.warnings),
            gap_reason="zip headers, pickle and alignment; copies and padding of ranks; what no tensor views",
        )

    def _tensor(self, key: Key, gathered: Gathered, copies: Copies) -> Tensor:
        made, pairs = gathered.tensor(key, str(self.path))
        copies.check(key, gathered, pairs)
        return made

    def _named(self, facts: Facts, hints: Hints) -> tuple[Optimizer, dict[tuple[str, str], Tree]]:
        self.found.states = self.states
        self.found.groups, self.found.optimizer_options = self.groups, self.options
        where, ranks = str(self.path), self.files.ranks
        flat = self.flat
        if flat is None and is_flat_state(self.model, self.states):
            flat = Flat(self.model, ways_of(self.model, ranks, where), {}, {}, {})
        if flat is None:
            optimizer, states = named_states(
                self.found, {n: g.final for n, g in self.model.items() if n not in self.ties}, where, hints.param_order
            )
            if optimizer.unnamed and len(ranks) == 1:
                alone = Flat(self.model, dict.fromkeys(ranks, 0), {}, {}, {})
                optimizer, states = flat_alone(alone, self.found, self.states, facts, (optimizer, states), where)
            self._require_alike(states)
        else:
            optimizer, states = flat_states(flat, self.found, facts, hints.param_order, where)
        scalars = {k: v for k, v in states.items() if not isinstance(v, Gathered)}
        return replace(optimizer, scalars=scalars), states

    def _require_alike(self, states: Mapping[tuple[str, str], Tree]) -> None:
        """Unsupported for state that is plain on every rank where its weight is cut: copies, or parts, who knows."""
        for (name, kind), value in states.items():
            weight = self.model.get(name)
            if len(self.files.ranks) == 1 or not isinstance(value, Gathered) or value.how != "plain" or not value.shape:
                continue
            is_part = weight is None or weight.how != "plain"
            if value.is_cut or (is_part and value.numel > len(value.sizes)):
                raise Unsupported(
                    f"{kind} of {name} is a plain tensor on every rank, and its weight is cut",
                    where=str(self.path),
                    why="whether they are copies or parts is in no file",
                    fix="leave the optimizer out with --no-optimizer",
                    code="ranks-plain",
                )

    def _paths(self) -> list[str]:
        return [n or self.path.name for n in self.names]

    def _require_ranks(self) -> None:
        """Damaged where files are not of the ranks that they say, MissingFile where one with a part is not there."""
        by_rank: dict[int, int] = {}
        for named, rank in self.written.items():
            if rank in by_rank:
                raise Damaged(
                    f"two files say that they are of rank {rank}",
                    where=str(self.path),
                    why=f"by their names they are of ranks {by_rank[rank]} and {named}",
                    fix="copy the files again: one of them is a copy of the other",
                    code="ranks-mixed",
                )
            by_rank[rank] = named
        wrong = next(((n, r) for n, r in self.written.items() if n != r), None)
        if wrong and (self.files.is_verl or set(self.written) == set(by_rank)):
            raise Damaged(
                f"the file named as rank {wrong[0]} says that it is of rank {wrong[1]}",
                where=str(self.path),
                fix="give the files the names that they were saved under",
                code="ranks-mixed",
            )
        missing = sorted(self.wanted - set(by_rank))
        if missing and self.path.is_file():
            raise Unsupported(
                f"the file holds rank {next(iter(by_rank))}'s part of a checkpoint of {len(self.wanted)} ranks",
                where=str(self.path),
                why="each rank's file has a slice of every tensor",
                fix="give the folder that holds the files of all ranks",
                code="rank-missing",
            )
        if missing:
            listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            why = f"the tensors of {self.names[0]} are cut over {len(self.wanted)} ranks, {len(by_rank)} are there"
            raise missing_ranks(f"rank {listed}", str(self.path), why)

    def _require_cut(self) -> None:
        """Unsupported where nothing tells how several ranks' tensors belong together: never decided by value."""
        if len(self.files.ranks) == 1 or not self.model:
            return
        if all(g.how == "plain" for g in self.model.values()):
            raise Unsupported(
                "every rank's file holds plain tensors: whether they are copies or parts is in no file",
                where=str(self.path),
                why=f"{len(self.model)} tensors on each of {len(self.files.ranks)} ranks",
                fix="where each rank holds a copy, give one of the files; parts of a model cannot be joined",
                code="ranks-plain",
            )
        cut = next((g for g in self.model.values() if g.is_cut), None)
        if cut is not None:
            raise Unsupported(
                f"{cut.name} has a different shape on each rank, and how they belong together is in no file",
                where=str(self.path),
                why=f"elements by rank: {cut.sizes}",
                code="ranks-plain",
            )

    def _facts(self) -> tuple[Facts, tuple[File, ...]]:
        """The model's config and the tokenizer's files, in verl's folder for them."""
        if not self.path.is_dir():
            return Facts(), ()
        self._require_fsdp_config()
        folder = self.path / CONFIGS
        if not (folder / CONFIG).is_file():
            own = self.path / CONFIG
            config = read_config(own, CONFIG) if own.is_file() else None
            return (Facts(config, read_whole(own), CONFIG), ()) if config is not None else (Facts(), ())
        config = read_config(folder / CONFIG, f"{CONFIGS}/{CONFIG}")
        found = scan_folder(folder)
        if found.chosen is not None:
            self.warnings.append(f"{CONFIGS}/ holds weights of its own ({found.chosen.files[0]}), which are not read")
        extras = [File(f"{CONFIGS}/{n}", (folder / n).stat().st_size, "extra") for n in found.carried]
        text = read_whole(folder / CONFIG)
        config_file = File(f"{CONFIGS}/{CONFIG}", len(text), "config")
        return Facts(config, text, f"{CONFIGS}/{CONFIG}"), (config_file, *extras)

    def _require_fsdp_config(self) -> None:
        file = self.path / FSDP_CONFIG
        if not (self.files.is_verl and file.is_file()):
            return
        self.sizes.append(File(FSDP_CONFIG, file.stat().st_size, "config"))
        said = read_config(file, FSDP_CONFIG).get("world_size")
        if type(said) is int and said != self.files.world:
            raise Damaged(
                "the files' names and fsdp_config.json tell different world sizes",
                where=str(self.path),
                why=f"{self.files.world} and {said}",
                fix="keep the files of one save in the folder",
                code="ranks-mixed",
            )

    def _step(self, values: Mapping[str, Tree], states: Mapping[tuple[str, str], Tree], data: DataFiles) -> int | None:
        """The step: a counter at the top, else what the optimizer's first parameter counts."""
        if (step := counted(values)) is not None:
            return step
        value = next((v for (_, kind), v in states.items() if kind == "step"), None)
        if isinstance(value, Gathered):
            row = value.columns[0].tolist() if len(value.columns) and not value.shape else None
            if row is None:
                return None
            try:
                raw = read_box(data.get(row[1]), row[2], (), (), value.dtype.itemsize)
            except CkptError:
                return None
            return number(Array(value.dtype.name, (), raw))
        return number(value)
