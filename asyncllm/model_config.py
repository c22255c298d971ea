"""The facts of one Hugging Face model folder that the engine above the model needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from asyncllm.errors import ModelLoadError

BUILTIN_MODELS = {
    "tiny": Path(__file__).parent / "assets" / "tiny",
    "tiny-draft": Path(__file__).parent / "assets" / "tiny-draft",
}


@dataclass(frozen=True)
class ModelConfig:
    """What `config.json` says. `hf_config` is for the model itself."""

    path: Path
    architecture: str
    hf_config: PretrainedConfig
    vocab_size: int
    max_position_embeddings: int
    context_window: int  # as far as the RoPE variant stretches it
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype_name: str
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_folder(cls, path: Path) -> ModelConfig:
        """Read `config.json`. Raises `ModelLoadError` naming the file and what is wrong in it."""
        file = path / "config.json"
        if not file.is_file():
            raise ModelLoadError(f"{path} is no model folder: it has no config.json")
        try:
            hf = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except (ValueError, KeyError, OSError, TypeError, AttributeError) as error:
            raise ModelLoadError(f"{file}: {error}") from error
        architectures = hf.architectures or []
        if not architectures:
            raise ModelLoadError(f"{file}: 'architectures' is missing")
        eos = hf.eos_token_id
        num_heads = hf.num_attention_heads
        return cls(
            path=path,
            architecture=architectures[0],
            hf_config=hf,
            vocab_size=hf.vocab_size,
            max_position_embeddings=hf.max_position_embeddings,
            context_window=_context_window(hf),
            num_layers=hf.num_hidden_layers,
            num_kv_heads=getattr(hf, "num_key_value_heads", None) or num_heads,
            head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // num_heads,
            dtype_name=str(hf.dtype or "float32").removeprefix("torch."),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        )


def resolve_model_path(name: str) -> Path:
    """A built-in model's name or a folder, as an absolute path. Raises `ModelLoadError`."""
    path = BUILTIN_MODELS.get(name) or Path(name).expanduser()
    if not path.is_dir():
        raise ModelLoadError(
            f"model {name!r} is neither a folder nor built in ({', '.join(BUILTIN_MODELS)})"
        )
    return path.resolve()


def _context_window(hf: PretrainedConfig) -> int:
    """max_position_embeddings, stretched where the RoPE variant stretches it (as vLLM does)."""
    rope = getattr(hf, "rope_parameters", None) or {}
    window = hf.max_position_embeddings
    if rope.get("rope_type") == "yarn":
        window = rope.get("original_max_position_embeddings") or window
    if rope.get("rope_type") in ("linear", "dynamic", "yarn"):
        window = int(window * rope.get("factor", 1))
    return int(window)
