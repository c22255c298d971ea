"""LoRA adapters as peft writes them: `adapter_config.json` and `adapter_model.safetensors`.

    base_model.model.<module>.lora_A.weight [r, in]      <module> as in the base checkpoint
    base_model.model.<module>.lora_B.weight [out, r]
    ....lora_B.bias [out]                                with lora_bias
    ....bias, ....base_layer.bias [out]                  the base's, trained on (bias, not none)
    ....lora_embedding_A [r, vocab], ....lora_embedding_B [size, r]
    ....lora_magnitude_vector [out]                      with DoRA
    ....weight [out, in] or [vocab, size]                the module's own, by modules_to_save
    ....base_layer.weight                                the base's, of embeddings
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

import torch
from safetensors import SafetensorError, safe_open

from asyncllm.errors import LoRALoadError
from asyncllm.host import in_turns
from asyncllm.lora import WEIGHTS_FILE
from asyncllm.models.layers.experts_method import ExpertsShape
from asyncllm.models.layers.lora import LoRALayers
from asyncllm.models.layers.lora_experts import LoRAExperts
from asyncllm.models.layers.lora_places import ALL, Place, WeightPart
from asyncllm.models.lora_config import PeftConfig, read_config
from asyncllm.models.lora_tensors import PIECE_ROWS, AdapterTensors

PICKLED_FILE = "adapter_model.bin"
NAME = re.compile(
    r"base_model\.model\.(.+?)\.(lora_[AB]\.weight|lora_B\.bias|lora_embedding_[AB]"
    r"|lora_magnitude_vector|(?:base_layer\.)?(?:bias|weight))"
)
PAIRS = ("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B")
READ_BYTES = 1 << 20
NAMES_PER_TURN = 64
WHOLE = ("weight", "base_layer.weight")


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """Facts about an adapter that was read. `content` is equal for equal files only."""

    content: bytes
    rank: int  # the largest of its modules


def read_adapter(
    folder: Path, layers: LoRALayers, slot: torch.Tensor, *, experts_alone: bool = False
) -> AdapterInfo:
    """Fill `slot` [elements], on the CPU and laid out as the slots of `layers`, with an adapter.
    experts_alone: `layers` are others' `of_experts`, who have the rest.

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
        with safe_open(file, framework="pt", device="cpu") as opened, file.open("rb") as content:
            slot.zero_()
            tensors, places = AdapterTensors(file, opened, content), layers.places(slot)
            reader = _Reader(tensors, config, layers, places, experts_alone)
            rank = reader.fill()
            layers.mark(slot)
    except (SafetensorError, OSError) as error:
        raise LoRALoadError(f"{file}: {error}") from error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):  # torch's words
            raise
        raise LoRALoadError(f"{file}: the host has no memory to read it: {error}") from error
    return AdapterInfo(_hash(config_bytes, file), rank)


class _Reader:
    def __init__(
        self,
        tensors: AdapterTensors,
        config: PeftConfig,
        layers: LoRALayers,
        places: dict[str, Place],
        experts_alone: bool,
    ) -> None:
        self._tensors, self._config, self._places = tensors, config, places
        self._max_rank, self._experts = layers.max_rank, _experts_of(layers)
        self._experts_alone, self._elsewhere = experts_alone, layers.elsewhere
        if layers.of_experts is not layers:
            self._elsewhere += tuple(_experts_of(layers.of_experts))
        self.modules: dict[str, dict[str, str]] = {}  # module -> kind of a tensor -> its name
        for name in in_turns(tensors, NAMES_PER_TURN):
            found = NAME.fullmatch(name)
            if found is None:
                raise tensors.error(f"tensor {name} is none that is served (lora_A, lora_B)")
            self.modules.setdefault(found[1], {})[found[2]] = name

    def fill(self) -> int:
        """Every tensor to its place. The largest rank."""
        if not self.modules:
            raise self._tensors.error("no tensors")
        return max([self._fill(module, names) for module, names in in_turns(self.modules.items())])

    def _fill(self, module: str, names: dict[str, str]) -> int:
        """Returns the rank; 0 of what is not low-rank alone."""
        stack = module.removesuffix(".base_layer")
        if stack in self._experts:
            return self._fill_experts(stack, self._experts[stack], names)
        module = self._as_in_checkpoint(module)
        place, first = self._places.get(module), next(iter(names.values()))
        if place is None and self._is_elsewhere(module):
            return 0
        if place is None:
            raise self._tensors.error(f"{first}: the model has no linear layer {module}")
        for kind in WHOLE:
            if kind in names:
                self._fill_whole(names[kind], place, module)
        rank, pair = 0, None
        for kinds in PAIRS:
            if any(kind in names for kind in kinds):
                pair = a, b = self._pair(module, names, kinds)
                self._check_rank(names[kinds[0]], rank := len(a))
                self._tensors.check(names[kinds[0]], a.shape, [rank, place.in_features])
                self._tensors.check(names[kinds[1]], b.shape, [place.out_features, rank])
                pair = a, b * self._config.scale(module, rank)
        gain = self._fill_gain(names, place, pair)
        if pair is not None:
            self._put(place, *pair, gain)
        self._fill_bias(module, place, names, rank, gain)
        return rank

    def _is_elsewhere(self, module: str) -> bool:
        if self._experts_alone:
            return not module.startswith(tuple(self._experts))
        return module.startswith(self._elsewhere)

    def _pair(
        self, module: str, names: dict[str, str], pair: tuple[str, str]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for kind in pair:
            if kind not in names:
                raise self._tensors.error(f"{module} has no {kind.removesuffix('.weight')}")
        return self._tensors.read(names[pair[0]]), self._tensors.read(names[pair[1]])

    def _put(
        self, place: Place, a: torch.Tensor, b: torch.Tensor, gain: torch.Tensor | float = 0.0
    ) -> None:
        if place.a is not None:
            b = b if place.rows is None else b[place.rows]
            place.a[: len(a)] = a[:, place.columns]
            place.b[:, : len(a)] = b * (1 + gain.unsqueeze(1)) if torch.is_tensor(gain) else b

    def _fill_bias(
        self,
        module: str,
        place: Place,
        names: dict[str, str],
        rank: int,
        gain: torch.Tensor | float,
    ) -> None:
        """lora_B's, scaled, and what the base's was changed by. The gain is for the product without
        the base's bias, and a whole weight's product has none."""
        change: torch.Tensor | float = 0.0
        base = 0.0 if place.base_bias is None else place.base_bias.cpu().float()
        if (name := names.get("lora_B.bias")) is not None:
            given = self._bias(name, place)
            change = given * self._config.scale(module, rank)
        for kind in ("bias", "base_layer.bias"):
            if (name := names.get(kind)) is not None:
                if place.bias is not None and place.base_bias is None:
                    raise self._tensors.error(f"{name}: the model has no bias of {module}")
                change = change + self._bias(name, place) - base
        if place.bias is not None:
            has_whole = place.weight is not None and place.weight.is_there
            place.bias.copy_(torch.as_tensor(change + (1.0 if has_whole else -gain) * base))

    def _bias(self, name: str, place: Place) -> torch.Tensor:
        """The outputs here."""
        if not place.takes_bias:
            raise self._tensors.error(f"{name}: biases of this module are not supported")
        given = self._tensors.read(name, [place.out_features])
        return given if place.rows is None else given[place.rows]

    # --- whole weights ------------------------------------------------------------------------

    def _fill_whole(self, name: str, place: Place, module: str) -> None:
        """To its room; where there is none, it must be the base's, as of embeddings peft saves
        what was not trained."""
        part = place.weight
        if part is None:
            raise self._tensors.error(f"{name}: whole weights of this module are not supported")
        if part.whole is None:
            if not self._is_base(name, part):
                least = module.rpartition(".")[2]
                raise self._tensors.error(
                    f"{name} is not the model's own, and the slots have no room for it: start with "
                    f"--lora-modules-to-save {least}"
                )
            return
        for rows, piece in self._tensors.pieces(name, part):
            part.whole[rows] = piece.to(part.whole.dtype)
        assert part.is_whole is not None
        part.is_whole.fill_(1)

    def _is_base(self, name: str, part: WeightPart) -> bool:
        base = part.base
        return base is not None and all(
            torch.equal(base[rows].cpu(), piece.to(base.dtype))
            for rows, piece in self._tensors.pieces(name, part)
        )

    def _fill_gain(
        self,
        names: dict[str, str],
        place: Place,
        pair: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor | float:
        """DoRA's magnitudes by the lengths of the rows of base and product, less 1."""
        name = names.get("lora_magnitude_vector")
        if name is None:
            if self._config.use_dora and pair is not None:
                raise self._tensors.error(f"{next(iter(names.values()))}: no lora_magnitude_vector")
            return 0.0
        part = place.weight
        if place.gain is None or part is None or part.base is None or part.columns != ALL:
            raise self._tensors.error(
                f"{name}: DoRA of embeddings, experts, quantised layers and of layers whose inputs "
                "are shared by ranks is not supported"
            )
        if pair is None or part.is_there:
            raise self._tensors.error(f"{name}: DoRA without lora_A and lora_B")
        magnitudes = self._tensors.read(name, [place.out_features])
        (a, b), base = pair, part.base
        if place.rows is not None:
            b, magnitudes = b[place.rows], magnitudes[place.rows]
        lengths = [
            (base[start : start + PIECE_ROWS].cpu().float() + its @ a).norm(dim=1)
            for start, its in zip(range(0, len(b), PIECE_ROWS), b.split(PIECE_ROWS), strict=True)
        ]
        gain = magnitudes / torch.cat(lengths) - 1
        if not gain.isfinite().all():
            raise self._tensors.error(f"{name}: rows of the weight are zeros")
        place.gain.copy_(gain)
        return gain

    # --- experts -----------------------------------------------------------------------------

    def _fill_experts(self, stack: str, shape: ExpertsShape, names: dict[str, str]) -> int:
        """Fill in all experts from one pair of tensors. Gates and ups have one A."""
        if extra := names.keys() - PAIRS[0]:
            raise self._tensors.error(f"{names[extra.pop()]} is not supported")
        module = f"{stack} of all experts"
        a, b = self._pair(module, names, PAIRS[0])
        a_name, b_name = (names[kind] for kind in PAIRS[0])
        num, size, hidden = shape.num_experts, shape.size, shape.hidden_size
        if a.dim() != 2 or b.dim() != 2 or len(a) % num or not len(a):
            raise self._tensors.error(f"{a_name} has shape {list(a.shape)}, for {num} experts")
        rank = len(a) // num
        is_down = len(b) == hidden and a.shape[1] == size
        self._check_rank(a_name, rank)
        self._tensors.check(a_name, a.shape, [num * rank, size if is_down else hidden])
        self._tensors.check(b_name, b.shape, [hidden if is_down else 2 * size, num * rank])
        parameter = "down_proj" if is_down else "gate_up_proj"
        scale = self._config.scale(f"{stack}.{parameter}", rank)
        a_each = a.unflatten(0, (num, rank))
        b_each = (b * scale).unflatten(1, (rank, num)).permute(2, 0, 1)  # [experts, out, rank]
        gate, up, down = shape.parts
        for expert, (mine_a, mine_b) in enumerate(in_turns(zip(a_each, b_each, strict=True))):
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

    def _check_rank(self, name: str, rank: int) -> None:
        if not 0 < rank <= self._max_rank:
            raise self._tensors.error(f"{name}: rank {rank} is over max_lora_rank {self._max_rank}")


def _experts_of(layers: LoRALayers) -> dict[str, ExpertsShape]:
    """By their names in the checkpoint, and in transformers."""
    experts = [layer for layer in layers.layers if isinstance(layer, LoRAExperts)]
    return {name: layer.shape for layer in experts for name in layer.names}


def _hash(config: bytes, file: Path) -> bytes:
    digest = hashlib.sha256(config)
    with file.open("rb") as opened:
        while piece := opened.read(READ_BYTES):
            digest.update(piece)
    return digest.digest()
