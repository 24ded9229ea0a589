"""An output read back: its rows as a data frame, its cells, and the facts that reports and trackers show."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.store import Store, reached
from workers.provenance import versions

if TYPE_CHECKING:
    import pandas as pd

    from pipeline.efficiency_report import EfficiencyReport
    from pipeline.report import Report


@dataclass(frozen=True)
class Output:
    """``sweep`` holds its name, output, start, the text of its file, versions and protocol."""

    store: Store
    rows: pd.DataFrame
    cells: list[dict[str, Any]]
    sweep: dict[str, Any]

    @property
    def timed(self) -> bool:
        """Whether its rows are isolated runs, which have times and no scores."""
        return bool(self.sweep.get("timing"))

    def report(self) -> Report | EfficiencyReport:
        if self.timed:
            from pipeline.efficiency_report import efficiency_report

            return efficiency_report(self.rows, self.cells, self.sweep)
        from pipeline.report import build_report

        return build_report(self.rows, self.cells, self.sweep)


def read_output(store: Store) -> Output:
    """Raises :class:`~pipeline.store.StoreError` where there is no sweep."""
    cells, sweep = read_plan(store)
    return Output(store, store.rows().to_pandas(), cells, sweep)


def read_plan(store: Store) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The cells, and what is known of the sweep as a whole."""
    manifest = store.manifest()
    cells = manifest.pop("cells")
    with reached(store.folder, "read"):
        text = store.folder.read("sweep.yaml") or b""
    return cells, {**manifest, "output": store.uri, "config_text": text.decode()}


def save_plan(store: Store, sweep_file: str, manifest: dict[str, Any]) -> None:
    """Keep the sweep file's text and what it means; the start is that of the first run."""
    before = store.manifest() if store.has_plan() else {}
    facts = {"started": before.get("started", time.time()), "versions": versions()}
    store.save_plan(sweep_file, {**manifest, **facts})
