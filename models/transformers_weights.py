"""Maps a checkpoint's tensors to those of a transformers model, by the library's tables.

The tables rename tensors and convert some. Merging experts and concatenating linear layers are done
by loading into views. Other conversions (splits, interleaved rows, transposes) load into temporary
tensors, which are converted when all is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from asyncllm.errors import ModelLoadError
from asyncllm.models.base import Load
from asyncllm.models.checkpoint import Checkpoint
from asyncllm.models.transformers_shards import ParameterShard, part_of


@dataclass(slots=True)
class Conversion:
    """Tensors of a checkpoint, by pattern, that are converted to one or more of the model."""

    target: str
    converter: WeightConverter
    sources: dict[str, list[str]] = field(default_factory=dict)


class WeightNames:
    """shards: by name, of parameters that are divided over ranks."""

    def __init__(self, model: Any, folder: Path, shards: Mapping[str, ParameterShard]) -> None:
        self._model = model
        self._shards = shards
        self._folder = folder
        self.aliases: dict[str, str | None] = {}
        self._transforms = get_model_conversion_mapping(model)  # of towers, too
        self._left_out: set[str] = set()
        self._read: list[tuple[Conversion, dict[str, list[torch.Tensor]]]] = []

    def leave_out(self, names: Iterable[str]) -> None:
        """Ignore these tensors of the checkpoint, whose modules are removed."""
        self._left_out |= {*names}

    def loads(self) -> Iterator[Load]:
        """Loads with the checkpoint's names; without a checkpoint, with the model's."""
        weights, twins = self._weights()
        try:
            checkpoint = Checkpoint(self._folder)
        except ModelLoadError:  # the loader raises it again
            for name, weight in weights.items():
                yield from _loads(name, weight, self._shards.get(name))
            return
        plain, conversions = self._sorted(checkpoint, weights, twins)
        for name, target in plain.items():
            yield from _loads(name, weights[target], self._shards.get(target))
        filled = set(plain.values())
        for conversion in conversions:
            yield from self._converted(checkpoint, conversion, weights)
            filled |= _targets(conversion)
        for name in weights.keys() - filled:  # the loader reports these as missing
            yield Load(name, weights[name])

    def finish_loading(self) -> None:
        """Convert the tensors that were loaded into temporary memory."""
        weights, _ = self._weights()
        for conversion, tensors in self._read:
            for pattern, its in tensors.items():
                conversion.converter.collected_tensors[pattern] = list(its)
            made = _convert(conversion, self._model)
            for name, tensor in made.items():
                whole = tensor[0] if isinstance(tensor, list) else tensor
                shard = self._shards.get(name)
                weights[name].copy_(whole if shard is None else shard.cut(whole))
        self._read.clear()

    def _weights(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Name -> weight, each once; and the other names of tied weights -> that name."""
        named = self._model.state_dict(keep_vars=True)
        weights: dict[str, torch.Tensor] = {}
        names: dict[int, str] = {}
        twins: dict[str, str] = {}
        for name, weight in named.items():
            if id(weight) in names:
                twins[name] = names[id(weight)]
            else:
                weights[name], names[id(weight)] = weight.detach(), name
        return weights, twins

    def _sorted(
        self, checkpoint: Checkpoint, weights: dict[str, torch.Tensor], twins: dict[str, str]
    ) -> tuple[dict[str, str], list[Conversion]]:
        """The checkpoint's names that are loaded into weights, and conversions. Ignored tensors and
        copies of tied weights become `aliases`."""
        renamings = [one for one in self._transforms if isinstance(one, WeightRenaming)]
        converters = [one for one in self._transforms if isinstance(one, WeightConverter)]
        by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        prefix, known = self._model.base_model_prefix, dict.fromkeys(weights, True)
        known |= dict.fromkeys([*twins, *self._left_out], True)
        ignored = [*(self._model._keys_to_ignore_on_load_unexpected or ())]
        plain: dict[str, str] = {}
        copies: dict[str, str] = {}
        conversions: dict[str, Conversion] = {}
        for name in sorted(checkpoint.names, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, prefix, known)
            if target not in known and name in known:
                target, pattern = rename_source_key(name, [], [], prefix, known)
            if target in self._left_out:
                self.aliases[name] = None
                continue
            if target not in known:
                if any(re.search(one, name) or re.search(one, target) for one in ignored):
                    self.aliases[name] = None
                continue  # the loader calls it unexpected
            if pattern is not None:
                new = Conversion(target, deepcopy(by_pattern[pattern]))
                conversion = conversions.setdefault(target, new)
                conversion.sources.setdefault(pattern, []).append(name)
            elif target in twins:
                copies[name] = twins[target]
            else:
                plain[name] = target
        name_of = {target: name for name, target in plain.items()}
        for name, target in copies.items():
            if (first := name_of.setdefault(target, name)) == name:  # only the copy is there
                plain[name] = target
            else:
                self.aliases[name] = first
        return plain, list(conversions.values())

    def _converted(
        self, checkpoint: Checkpoint, conversion: Conversion, weights: dict[str, torch.Tensor]
    ) -> Iterator[Load]:
        merges = [type(one) for one in conversion.converter.operations]
        if merges in ([MergeModulelist], [MergeModulelist, Concatenate], [Concatenate]):
            target = conversion.target
            yield from _merged(checkpoint, conversion, weights[target], self._shards.get(target))
            return
        like, tensors = weights[conversion.target], {}
        for pattern, names in conversion.sources.items():
            shapes = [checkpoint.header(name)[0] for name in names]
            tensors[pattern] = [like.new_empty(shape) for shape in shapes]
            for name, tensor in zip(names, tensors[pattern], strict=True):
                yield Load(name, tensor)
        self._read.append((conversion, tensors))


def _merged(
    checkpoint: Checkpoint,
    conversion: Conversion,
    weight: torch.Tensor,
    shard: ParameterShard | None,
) -> Iterator[Load]:
    """Views of a weight whose first dimension counts experts, or of one that is concatenated."""
    *merge, last = conversion.converter.operations
    stacks = bool(merge) or isinstance(last, MergeModulelist)
    dim = last.dim - bool(merge) if isinstance(last, Concatenate) else None
    of_one = shard
    if shard is not None and stacks:
        of_one = replace(shard, shape=shard.shape[1:], dim=shard.dim - 1)
    start = 0
    for pattern in conversion.converter.source_patterns:
        names = conversion.sources.get(pattern, [])
        if stacks and len(names) != len(weight):
            raise _misfit(checkpoint, conversion, f"{len(names)} of {len(weight)} {pattern}")
        size = checkpoint.header(names[0])[0][dim] if dim is not None and names else 0
        for expert, name in enumerate(names):
            view = weight[expert] if stacks else weight
            at = None if dim is None else (dim, start, size)
            yield from _loads(name, view, of_one, at)
        start += size
    full = weight.shape if shard is None else shard.shape
    if dim is not None and start != full[last.dim]:
        raise _misfit(checkpoint, conversion, f"{start} of {full[last.dim]} rows")


def _loads(
    name: str,
    view: torch.Tensor,
    shard: ParameterShard | None,
    at: tuple[int, int, int] | None = None,
) -> Iterator[Load]:
    """Load a file's tensor that is a weight, or the part of it that begins `at` an index of a
    dimension and has a size; view: all that the rank has of the weight."""
    full = list(view.shape if shard is None else shard.shape)
    if at is not None and at[1] + at[2] <= full[at[0]]:  # else it does not fit, as the loader says
        full[at[0]] = at[2]
        if shard is None or shard.dim != at[0]:
            view = view.narrow(*at)
    if shard is None:
        yield Load(name, view)
        return
    first = at[1] if at is not None and shard.dim == at[0] else 0
    for part, start in shard.within(first, first + full[shard.dim]):
        own = view.narrow(shard.dim, start, part.stop - part.start)
        yield Load(name, own, part_of(shard.dim, part), file_shape=tuple(full))


def _misfit(checkpoint: Checkpoint, conversion: Conversion, what: str) -> ModelLoadError:
    return ModelLoadError(f"{checkpoint.source}: holds {what} for {conversion.target}")


def _targets(conversion: Conversion) -> set[str]:
    first, *others = conversion.converter.target_patterns
    return {conversion.target, *(conversion.target.replace(first, other) for other in others)}


def _convert(conversion: Conversion, model: Any) -> dict[str, Any]:
    try:
        return conversion.converter.convert(conversion.target, model=model, config=model.config)
    except Exception as error:  # of no common base
        raise ModelLoadError(f"{conversion.target}: {error}") from error
