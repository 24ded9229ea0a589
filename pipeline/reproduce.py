"""How to run a sweep again: commands, versions, the sweep file, models, and data with their checksums, as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

import yaml


def reproduce_section(sweep: Mapping[str, Any], contexts: Iterable[int] = ()) -> str:
    """Commands, with the versions they ran under; the sweep file; the models and the data with their checksums.

    ``contexts``: the lengths that were run, which may be others than the file's.
    """
    config = str(sweep.get("config_text", ""))
    if not config:
        return ""
    versions = {str(key): str(value) for key, value in sweep.get("versions", {}).items()}
    pinned = " ".join(
        f"{key}=={value.partition('+')[0]}" for key, value in versions.items() if key not in ("python", "kvsweep")
    )
    files = sweep.get("data", {}).get("files", {})
    folder = " --data-dir DIR" if any(one["from"] == "data folder" for one in files.values()) else ""
    limit = f" --limit {sweep['limit']}" if sweep.get("limit") else ""
    commands = [
        f"# kvsweep {versions.get('kvsweep', '')}, Python {versions.get('python', '')}: in its checkout",
        f"pip install -e . {pinned}".rstrip(),
        "# the file below, as sweep.yaml",
        f"kvsweep data check sweep.yaml{folder}",
        f"kvsweep run sweep.yaml{folder}{limit}{_in_place(sweep, config, contexts)} --output results/again",
    ]
    rows = [
        (f"model {label}", f"{one.get('source', '')}{_revision(one)}, {one.get('dtype', '')}")
        for label, one in sweep.get("models", {}).items()
    ]
    rows += [(f"data {path}", f"{one['from']}, {one['path']}, sha256 {one['sha256']}") for path, one in files.items()]
    body = "".join(f"<tr><td>{escape(key)}</td><td>{escape(value)}</td></tr>" for key, value in rows)
    table = f"<div class='scroll'><table class='texts'><tbody>{body}</tbody></table></div>" if rows else ""
    return f"<pre>{escape(chr(10).join(commands))}</pre><pre>{escape(config)}</pre>{table}"


def _in_place(sweep: Mapping[str, Any], config: str, contexts: Iterable[int]) -> str:
    """``--model`` and ``--context``, where the sweep ran with others than its file says."""
    try:
        said = yaml.safe_load(config)
    except yaml.YAMLError:
        return ""
    if not isinstance(said, dict):
        return ""
    ours = {str(one.get("source")) for one in said.get("models") or [] if isinstance(one, dict)}
    held = [str(one.get("source")) for one in sweep.get("models", {}).values()]
    lengths = [length for length in contexts if length]
    model = f" --model {held[0]}" if len(held) == 1 and held[0] not in ours else ""
    written = said.get("contexts") or (said.get("timing") or {}).get("prompt_tokens") or []
    context = f" --context {lengths[0]}" if len(lengths) == 1 and lengths[0] not in written else ""
    return model + context


def _revision(model: Mapping[str, Any]) -> str:
    return f" at {model['revision']}" if model.get("revision") else ""
