"""The measures that both kinds of diagnostics leave in their output folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.files import put

if TYPE_CHECKING:
    from workers.layer_measures import Measure

COLUMNS = ("condition", "name", "parameter", "layer", "head", "numerator", "denominator")


def keep_measures(path: Path, trace: str, measures: Sequence[Measure]) -> None:
    """One row per measure of a trace, head by head."""
    import pyarrow as pa
    from pyarrow import parquet

    rows = {key: [getattr(one, key) for one in measures] for key in COLUMNS}
    held = pa.table({"trace": [trace] * len(measures)} | rows)
    sink = pa.BufferOutputStream()
    parquet.write_table(held, sink)
    put(path, sink.getvalue().to_pybytes())
