"""Pretrained models of other projects, as tables: one module per family, used to read and to write.

A folder has `config.json` and `*.safetensors`. Adding a family is a table of fields and tensor names in a module of
its own, a line in FAMILIES, and a row in the tests.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Container
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ..config import ModelConfig
from ..parameters import model_parameters
from . import bert, bloom, gpt2, gpt_neox, llama, phi, t5
from .family import Family, Given, read_config, write_config
from .folder import Stored, has_nan, read_entries, read_fields, view, write_folder
from .operations import Entry, Shape

# In the order in which `family_of` tries them: the plainer before those that can say the same and more.
FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        gpt2.FAMILY, llama.LLAMA, llama.MISTRAL, llama.QWEN2, llama.QWEN3, llama.GEMMA, llama.GEMMA2, phi.FAMILY,
        gpt_neox.FAMILY, bloom.FAMILY, bert.FAMILY, t5.FAMILY,
    )
}  # fmt: skip


class Pretrained:
    """A checked folder: `config`, `family`, and `read(name)` for each of our parameters.

    Refused, before any tensor is read: FileNotFoundError for a missing folder, config or weights; ValueError, naming
    what is wrong, for an unknown family or architecture, a field nobody reads, a missing, surplus or misshapen tensor,
    a file that is not sound, and pickles.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        fields = read_fields(self.folder)
        family = FAMILIES.get(str(fields.get("model_type")))
        if family is None:
            raise ValueError(
                f"{self.folder / 'config.json'} has model_type {fields.get('model_type')!r}; known families are "
                f"{', '.join(FAMILIES)}"
            )
        self.family = family.name
        entries = read_entries(self.folder)
        head, prefix = _architecture(family, fields, self.folder)
        self._stored = _plain_names(family, prefix, entries, self.folder)
        if head is None:
            can = any(each == "lm" for each, _ in family.architectures.values())
            has = "lm_head.weight" in self._stored or fields.get("tie_word_embeddings", False)
            head = "lm" if can and has else "none"
        try:
            self.config = read_config(family, Given(fields, frozenset(self._stored), head))
        except (ValueError, TypeError) as error:
            raise type(error)(f"{self.folder / 'config.json'}: {error}") from error
        self._fields = {"type_vocab_size": fields.get("type_vocab_size", 2)}
        self.shapes = {name: p.shape for name, p in model_parameters(self.config).items()}
        self._lines = expanded(family, self.config, self.shapes)
        self._places = {
            name: (line, position)
            for line in self._lines
            for position, name in enumerate(line.ours)
        }  # fmt: skip
        self._check(family)
        self._looked_at: set[str] = set()

    def _check(self, family: Family) -> None:
        """Every tensor is there, has its shape, and is expected."""
        problems, used = [], set()
        for line in self._lines:
            shapes = line.operation.shapes([self.shapes[name] for name in line.ours], self.config, self._fields)
            for name, shape in zip(line.stored, shapes, strict=True):
                found = self._stored.get(self._found(family, name))
                used.add(self._found(family, name))
                if found is None:
                    problems.append(f"{name} is missing")
                elif found.shape != shape:
                    problems.append(f"{name} has shape {found.shape}, where the config asks for {shape}")
        for name in self._stored:
            if name in used or any(re.fullmatch(pattern, name) for pattern in family.ignored):
                continue
            first = self._found(family, family.aliases.get(name, ""))
            if first not in self._stored:
                problems.append(f"{name} is not a tensor of this model")
            elif not _same(self._stored[name], self._stored[first]):
                problems.append(f"{name} differs from {first}, which the config ties it to")
        if problems:
            shown = problems[:40] + ([f"and {len(problems) - 40} more"] if len(problems) > 40 else [])
            raise ValueError(f"{self.folder} does not hold the {family.name} its config describes: {'; '.join(shown)}")

    def _found(self, family: Family, name: str) -> str:
        """The name under which a tensor is there: its own, or a second one where only that was written."""
        if name not in self._stored:
            for alias, first in family.aliases.items():
                if first == name and alias in self._stored:
                    return alias
        return name

    def read(self, name: str) -> np.ndarray:
        """Parameter `name` in the file's dtype: a view of the mapped file where the table allows one.

        A tensor that holds NaN is named in a warning, once.
        """
        line, position = self._places[name]
        arrays = []
        for stored in line.stored:
            found = self._found(FAMILIES[self.family], stored)
            arrays.append(view(self._stored[found]))
            if stored not in self._looked_at and has_nan(arrays[-1]):
                warnings.warn(f"{stored} of {self.folder} holds NaN", UserWarning, stacklevel=3)
            self._looked_at.add(stored)
        return line.operation.load(arrays, self.config, [self.shapes[each] for each in line.ours], position)


def _architecture(family: Family, fields: dict[str, Any], folder: Path) -> tuple[str | None, str]:
    """Our head by the architecture the folder names, None where it names none; and the prefix of the base model."""
    prefixes = [prefix for _, prefix in family.architectures.values() if prefix]
    default = prefixes[0] if prefixes else ""
    named = fields.get("architectures")
    if not named:
        return None, default
    if named[0] not in family.architectures:
        raise ValueError(
            f"{folder / 'config.json'} has the architecture {named[0]!r}; of {family.name}, known are "
            f"{', '.join(family.architectures)}"
        )
    head, prefix = family.architectures[named[0]]
    return head, prefix or default


def _plain_names(family: Family, prefix: str, entries: dict[str, Stored], folder: Path) -> dict[str, Stored]:
    """The tensors by the base model's names, whatever the file puts before them."""
    found: dict[str, Stored] = {}
    for name, stored in entries.items():
        plain = name.removeprefix(prefix)
        for pattern, text in family.renamed:
            plain = re.sub(pattern, text, plain)
        if plain in found:
            raise ValueError(
                f"{folder} holds {plain} twice, with and without {prefix!r} before it or under an old name"
            )
        found[plain] = stored
    return found


def expanded(family: Family, config: ModelConfig, known: Container[str]) -> list[Entry]:
    """The lines of a family's table for this configuration, whose parameters are `known`, layer by layer."""
    lines = []
    for line in family.tensors:
        if line.when is not None and getattr(config, line.when[0]) != line.when[1]:
            continue
        for i in range(config.layers) if "{i}" in line.stored[0] else (0,):
            ours = tuple(name.replace("{i}", str(i)) for name in line.ours)
            if all(name in known for name in ours):
                stored = tuple(name.replace("{i}", str(i)) for name in line.stored)
                lines.append(Entry(stored, ours, line.operation))
    return lines


def _same(first: Stored, second: Stored) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    a, b = view(first), view(second)
    return a.tobytes() == b.tobytes() if a.size < 1 << 16 else all(
        x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True)
    )  # fmt: skip


def family_of(config: ModelConfig, family: str | None = None) -> Family:
    """The family that can say this configuration: the one named, or the first of those that can."""
    if family is not None:
        if family not in FAMILIES:
            raise ValueError(f"family must be one of {', '.join(map(repr, FAMILIES))} or None; got {family!r}")
        fields_of(FAMILIES[family], config)
        return FAMILIES[family]
    reasons = []
    for each in FAMILIES.values():
        try:
            fields_of(each, config)
        except (ValueError, TypeError) as error:
            reasons.append(str(error))
        else:
            return each
    raise ValueError("no family can say this configuration: " + "; ".join(reasons))


def fields_of(family: Family, config: ModelConfig) -> dict[str, Any]:
    """Their `config.json` of our configuration, read back and found to mean the same."""
    known = model_parameters(config)
    lines = expanded(family, config, known)
    covered = {name for line in lines for name in line.ours}
    uncovered = [name for name in known if name not in covered]
    if uncovered:
        raise ValueError(f"{family.name} has no tensor for {uncovered[0]}")
    stored = frozenset(name for line in lines for name in line.stored)
    heads = [name for name, (head, _) in family.architectures.items() if head == config.head]
    if not heads:
        raise ValueError(f"{family.name} cannot say head={config.head!r}")
    return write_config(family, config, heads[0], stored)


def write_pretrained(
    folder: str | os.PathLike[str],
    config: ModelConfig,
    read: Callable[[str], np.ndarray],
    family: str | None = None,
    max_shard_size: int | str | None = None,
) -> str:
    """Write a folder that `Pretrained` and the family's home library read; gives the family's name.

    `read` gives a parameter by its canonical name; it is asked for one stored tensor's worth at a time.
    `max_shard_size`: the most bytes of a file, such as "5GB"; None writes one file whatever its size.
    """
    table = family_of(config, family)
    fields = fields_of(table, config)
    prefix = table.architectures[fields["architectures"][0]][1]
    shapes = {name: p.shape for name, p in model_parameters(config).items()}
    dtype = read("decoder.embedding.weight" if config.kind == "encoder_decoder" else "embedding.weight").dtype.name
    lines = expanded(table, config, shapes)
    layout: list[tuple[str, str, Shape]] = []
    for line in lines:
        stored = line.operation.shapes([shapes[name] for name in line.ours], config, fields)
        layout += [(_full(prefix, name), dtype, shape) for name, shape in zip(line.stored, stored, strict=True)]

    saved = (line.operation.save([read(name) for name in line.ours], config, fields) for line in lines)
    fields |= {"dtype": dtype, "torch_dtype": dtype}
    write_folder(folder, fields, layout, chain.from_iterable(saved), max_shard_size)
    return table.name


def _full(prefix: str, name: str) -> str:
    return name if name.startswith("lm_head.") else prefix + name
