"""LoRA adapters as peft writes them: `adapter_config.json` and `adapter_model.safetensors`.

    base_model.model.<module>.lora_A.weight [r, in]      <module> as in the base checkpoint
    base_model.model.<module>.lora_B.weight [out, r]
    ....lora_B.bias [out]                                with lora_bias
    ....bias, ....base_layer.bias [out]                  the base's, trained on (bias, not none)
    ....lora_embedding_A [r, vocab], ....lora_embedding_B [size, r]
    ....base_layer.weight                                the base's, not trained on, of embeddings
    <experts>[.base_layer].lora_A.weight [experts * r, in], .lora_B.weight [out, r * experts]

`read_adapter` checks an adapter against the base model's layers and lays it out as a slot of
`LoRALayers`, scaled and filled up to the largest rank. What is not served exactly is refused with
its name. A pickled adapter (.bin) is never opened, because reading one runs its code.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from asyncllm.errors import LoRALoadError
from asyncllm.models.layers.experts_method import ExpertsShape
from asyncllm.models.layers.lora import LoRALayers, Place
from asyncllm.models.layers.lora_experts import LoRAExperts
from asyncllm.models.lora_config import PeftConfig, read_config

WEIGHTS_FILE = "adapter_model.safetensors"
PICKLED_FILE = "adapter_model.bin"
NAME = re.compile(
    r"base_model\.model\.(.+?)\.(lora_[AB]\.weight|lora_B\.bias|lora_embedding_[AB]"
    r"|(?:base_layer\.)?bias|base_layer\.weight)"
)
PAIRS = ("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B")
READ_BYTES = 1 << 20
COMPARED_ROWS = 4096  # of a weight that is repeated, at a time: the device has other things to do


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """Facts about an adapter that was read. `content` is equal for equal files only."""

    content: bytes
    rank: int  # the largest of its modules
    modules: tuple[str, ...]


def read_adapter(folder: Path, layers: LoRALayers, slot: torch.Tensor) -> AdapterInfo:
    """Fill `slot` [elements], on the CPU and laid out as the slots of `layers`, with an adapter.

    Raises `LoRALoadError` naming file, tensor or setting, and the value; `slot` then holds
    anything.
    """
    file = folder / WEIGHTS_FILE
    if not file.is_file():
        pickled = (folder / PICKLED_FILE).is_file()
        why = f"only {PICKLED_FILE}, and pickled weights are never read" if pickled else "missing"
        raise LoRALoadError(f"{file}: {why}")
    config, config_bytes = read_config(folder)
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            slot.zero_()
            reader = _Reader(file, opened, config, layers, layers.places(slot))
            rank = reader.fill()
    except (SafetensorError, OSError) as error:
        raise LoRALoadError(f"{file}: {error}") from error
    return AdapterInfo(_hash(config_bytes, file), rank, tuple(sorted(reader.modules)))


class _Reader:
    def __init__(
        self,
        file: Path,
        opened: Any,
        config: PeftConfig,
        layers: LoRALayers,
        places: dict[str, Place],
    ) -> None:
        self._file, self._opened, self._config, self._places = file, opened, config, places
        self._max_rank, self._elsewhere = layers.max_rank, layers.elsewhere
        self._experts = {
            name: layer.shape
            for layer in layers.layers
            if isinstance(layer, LoRAExperts)
            for name in layer.names
        }
        self.modules: dict[str, dict[str, str]] = {}  # module -> kind of a tensor -> its name
        for name in opened.keys():  # noqa: SIM118 (it is no dict)
            found = NAME.fullmatch(name)
            if found is None:
                raise self._error(f"tensor {name} is none that is served (lora_A, lora_B)")
            self.modules.setdefault(found[1], {})[found[2]] = name

    def fill(self) -> int:
        """Every tensor to its place. The largest rank."""
        if not self.modules:
            raise self._error("no tensors")
        return max([self._fill(module, names) for module, names in self.modules.items()])

    def _fill(self, module: str, names: dict[str, str]) -> int:
        """Returns the rank; 0 of a bias alone."""
        stack = module.removesuffix(".base_layer")
        if stack in self._experts:
            return self._fill_experts(stack, self._experts[stack], names)
        module = self._as_in_checkpoint(module)
        place, first = self._places.get(module), next(iter(names.values()))
        if place is None and module.startswith(self._elsewhere):
            return 0
        if place is None:
            raise self._error(f"{first}: the model has no linear layer {module}")
        rank = 0
        for pair in PAIRS:
            if any(kind in names for kind in pair):
                a, b = self._pair(module, names, pair)
                self._check_rank(names[pair[0]], rank := len(a))
                self._check(names[pair[0]], a, [rank, place.in_features])
                self._check(names[pair[1]], b, [place.out_features, rank])
                self._put(place, a, b * self._config.scale(module, rank))
        self._fill_bias(module, place, names, rank)
        if "base_layer.weight" in names:
            self._compare(names["base_layer.weight"], place)
        return rank

    def _pair(
        self, module: str, names: dict[str, str], pair: tuple[str, str]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for kind in pair:
            if kind not in names:
                raise self._error(f"{module} has no {kind.removesuffix('.weight')}")
        return self._tensor(names[pair[0]]), self._tensor(names[pair[1]])

    def _put(self, place: Place, a: torch.Tensor, b: torch.Tensor) -> None:
        if place.a is not None:
            place.a[: len(a)] = a[:, place.columns]
            place.b[:, : len(a)] = b if place.rows is None else b[place.rows]

    def _fill_bias(self, module: str, place: Place, names: dict[str, str], rank: int) -> None:
        """lora_B's, scaled, and what the base's was changed by."""
        change: torch.Tensor | float = 0.0
        if (name := names.get("lora_B.bias")) is not None:
            given = self._bias(name, place)
            change = given * self._config.scale(module, rank)
        for kind in ("bias", "base_layer.bias"):
            if (name := names.get(kind)) is not None:
                if place.bias is not None and place.base_bias is None:
                    raise self._error(f"{name}: the model has no bias of {module}")
                base = 0.0 if place.base_bias is None else place.base_bias.cpu().float()
                change = change + self._bias(name, place) - base
        if place.bias is not None:
            place.bias.copy_(torch.as_tensor(change))

    def _bias(self, name: str, place: Place) -> torch.Tensor:
        """The outputs here."""
        if not place.takes_bias:
            raise self._error(f"{name}: biases of this module are not supported")
        given = self._tensor(name)
        self._check(name, given, [place.out_features])
        return given if place.rows is None else given[place.rows]

    def _compare(self, name: str, place: Place) -> None:
        """Require that an embedding that peft saved is the base's: full tensors have no slot."""
        base, given = place.base_weight, self._opened.get_slice(name)
        vocabulary = max(place.in_features, place.out_features)
        own = range(vocabulary)[place.base_rows]
        same = base is not None and given.get_shape() == [vocabulary, base.shape[1]]
        for start in own[::COMPARED_ROWS] if same else ():
            assert base is not None
            end = min(start + COMPARED_ROWS, own.stop)
            rows = base[start - own.start : end - own.start].cpu()
            same = same and torch.equal(rows, given[start:end].to(rows.dtype))
        if not same:
            raise self._error(f"{name} is not the model's own; trained weights are not supported")

    # --- experts -----------------------------------------------------------------------------

    def _fill_experts(self, stack: str, shape: ExpertsShape, names: dict[str, str]) -> int:
        """Fill in all experts from one pair of tensors. Gates and ups have one A."""
        if extra := names.keys() - PAIRS[0]:
            raise self._error(f"{names[extra.pop()]} is not supported")
        module = f"{stack} of all experts"
        a, b = self._pair(module, names, PAIRS[0])
        a_name, b_name = (names[kind] for kind in PAIRS[0])
        num, size, hidden = shape.num_experts, shape.size, shape.hidden_size
        if a.dim() != 2 or b.dim() != 2 or len(a) % num or not len(a):
            raise self._error(f"{a_name} has shape {list(a.shape)}, for {num} experts")
        rank = len(a) // num
        is_down = len(b) == hidden and a.shape[1] == size
        self._check_rank(a_name, rank)
        self._check(a_name, a, [num * rank, size if is_down else hidden])
        self._check(b_name, b, [hidden if is_down else 2 * size, num * rank])
        parameter = "down_proj" if is_down else "gate_up_proj"
        scale = self._config.scale(f"{stack}.{parameter}", rank)
        a_each = a.unflatten(0, (num, rank))
        b_each = (b * scale).unflatten(1, (rank, num)).permute(2, 0, 1)  # [experts, out, rank]
        gate, up, down = shape.parts
        for expert, (mine_a, mine_b) in enumerate(zip(a_each, b_each, strict=True)):
            names_of = {part: f"{stack}.{expert}.{part}" for part in shape.parts}
            places = {p: self._places[self._as_in_checkpoint(n)] for p, n in names_of.items()}
            if is_down:
                self._put(places[down], mine_a, mine_b)
            else:
                halves = (mine_b[0::2], mine_b[1::2]) if shape.interleaved else mine_b.chunk(2)
                self._put(places[gate], mine_a, halves[0])
                self._put(places[up], mine_a, halves[1])
        return rank

    def _as_in_checkpoint(self, module: str) -> str:
        """Mixtral's modules have another name in transformers, by which peft goes."""
        other = module.replace(".mlp.", ".block_sparse_moe.")
        return other if module not in self._places and other in self._places else module

    # --- tensors -----------------------------------------------------------------------------

    def _tensor(self, name: str) -> torch.Tensor:
        """In float32."""
        dtype = self._opened.get_slice(name).get_dtype()
        if dtype not in ("F32", "F16", "BF16"):
            raise self._error(f"{name} has dtype {dtype}")
        tensor: torch.Tensor = self._opened.get_tensor(name)
        if not tensor.isfinite().all():
            raise self._error(f"{name} holds NaN or infinity")
        return tensor.float()

    def _check(self, name: str, tensor: torch.Tensor, wanted: list[int]) -> None:
        if list(tensor.shape) != wanted:
            raise self._error(f"{name} has shape {list(tensor.shape)}, the model needs {wanted}")

    def _check_rank(self, name: str, rank: int) -> None:
        if not 0 < rank <= self._max_rank:
            raise self._error(f"{name}: rank {rank} is over max_lora_rank {self._max_rank}")

    def _error(self, what: str) -> LoRALoadError:
        return LoRALoadError(f"{self._file}: {what}")


def _hash(config: bytes, file: Path) -> bytes:
    digest = hashlib.sha256(config)
    with file.open("rb") as opened:
        while piece := opened.read(READ_BYTES):
            digest.update(piece)
    return digest.digest()
