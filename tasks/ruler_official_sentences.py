"""Sentences as the official generator cuts its essays: NLTK's Punkt model for English.

NLTK and its model are an extra (``pip install 'kvsweep[official]'``). The model is looked for where NLTK looks
(``NLTK_DATA``, ``~/nltk_data`` ...), then in the package llama-index-core, which ships it.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tasks.sources import DataError, content_hash, fingerprint

MODEL = "tokenizers/punkt_tab/english"
FIX = "pip install 'kvsweep[official]', then python -m nltk.downloader punkt_tab"


@lru_cache(maxsize=4)
def cut_sentences(text: str) -> tuple[str, ...]:
    return tuple(_tokenizer().tokenize(text))


def sentence_recipe() -> dict[str, str]:
    """What the cuts rest on; raises :class:`DataError` where it is not there."""
    folder = Path(str(_model()))
    return {
        "nltk": metadata.version("nltk"),
        "punkt_tab": content_hash({file.name: fingerprint(file) for file in sorted(folder.iterdir())}),
    }


@lru_cache(maxsize=1)
def _tokenizer() -> Any:
    model = _model()
    from nltk.tokenize.punkt import PunktSentenceTokenizer, load_punkt_params

    return PunktSentenceTokenizer(load_punkt_params(model))


def _model() -> Any:
    """NLTK's pointer to the model's folder."""
    try:
        from nltk import data
    except ImportError as error:
        raise DataError(f"generator: official cuts essays with NLTK, which is not installed: {FIX}") from error
    # NLTK reads no file outside the folders that it looks in.
    data.path += [place for place in _shipped() if place not in data.path]
    try:
        return data.find(f"{MODEL}/")
    except LookupError as error:
        raise DataError(
            f"generator: official cuts essays with NLTK's Punkt model, and there is no {MODEL} in "
            f"{', '.join(data.path)}: {FIX}"
        ) from error


def _shipped() -> list[str]:
    package = find_spec("llama_index")
    roots = package.submodule_search_locations if package else None
    return [str(Path(root) / "core" / "_static" / "nltk_cache") for root in roots or ()]
