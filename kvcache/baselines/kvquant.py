"""KVQuant (Hooper et al., arXiv 2401.18079): keys before rotation per channel, values per token, codebooks fitted to
the model, and a few outliers kept beside the codes.

bits per element = bits + 32 outliers, and 32 for the scale and offset of a token's values     §3.1 to §3.5

Codebooks and key thresholds come from a calibration, which ``kvsweep calibrate`` makes once for each model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvcache.budget import ResolvedBudget
from kvcache.calibration import SUFFIX, CalibrationFacts, content_digest, read_facts
from kvcache.fixed import FixedMethod
from kvcache.layout import LayerLayout
from kvcache.method import NotCalibrated
from kvcache.sparse_grid import MOST_SINKS, SparseGrid

if TYPE_CHECKING:
    from kvcache.dense_sparse import LayerTables
    from kvcache.layout import CacheLayout
    from kvcache.pool import Compressed, FamilyPool, PoolShape
    from kvcache.prefill import Prefill

BITS = (2, 3, 4)
MOST_CHANNELS = 2**15 - 1
"""Of a token: an outlier's channel has 16 bits."""


@dataclass(frozen=True)
class KVQuant(FixedMethod):
    """``outliers``: the share kept in fp16, half of it at either end; ``sinks``: first tokens in full precision.
    ``calibration``: a file, by its path or by its name in the cache; a sweep finds the only one that fits by itself."""

    name: ClassVar[str] = "kvquant"
    version: ClassVar[int] = 2

    bits: int = 3
    outliers: float = 0.01
    sinks: int = 1
    calibration: str = ""

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits is among {BITS}, not {self.bits}")
        if not 0 <= self.outliers <= 1:
            raise ValueError(f"outliers is between 0 and 1, not {self.outliers}")
        if not 0 <= self.sinks <= MOST_SINKS:
            raise ValueError(f"sinks is between 0 and {MOST_SINKS}, not {self.sinks}")
        if self.calibration and not self.calibration.endswith(SUFFIX):
            raise ValueError(f"calibration is a file of `kvsweep calibrate`, *{SUFFIX}, not {self.calibration!r}")

    @property
    def family(self) -> str:
        return f"non-uniform low-bit ({_listed(self.identity[2])})"

    @property
    def identity(self) -> list[Any]:
        """Of a calibration its contents count, not where it lies."""
        try:
            digest = content_digest(Path(self.calibration)) if self.calibration else ""
        except NotCalibrated:
            digest = ""
        return [self.name, self.version, {**self.settings(), "calibration": digest}]

    @property
    def grid(self) -> SparseGrid:
        return SparseGrid(self.bits, self.outliers, self.sinks)

    @property
    def calibrated_settings(self) -> dict[str, Any]:
        """What a calibration must have been made for."""
        return {name: value for name, value in self.settings().items() if name != "calibration"}

    # -- the calibration -----------------------------------------------------------------------------------------------

    def fitted(self, model: str, source: str, folder: Path) -> KVQuant:
        path = self._named(folder) if self.calibration else self._found(model, source, folder)
        try:
            fault = self._misfit(read_facts(path), model)
        except NotCalibrated as error:
            fault = str(error)
        if fault:
            raise NotCalibrated(f"kvquant: {fault}; run `{self._command(source)}`")
        return replace(self, calibration=str(path.absolute()))

    def _named(self, folder: Path) -> Path:
        path = Path(self.calibration).expanduser()
        return folder / path if path.name == self.calibration else path

    def _found(self, model: str, source: str, folder: Path) -> Path:
        files = sorted(folder.glob(f"{self.name}-*{SUFFIX}"))
        fitting = [path for path in files if not self._misfit(read_facts(path), model)]
        if not fitting:
            raise NotCalibrated(f"kvquant has no calibration of {source}: run `{self._command(source)}`")
        if len(fitting) > 1:
            names = ", ".join(path.name for path in fitting)
            raise NotCalibrated(f"kvquant has several calibrations of {source}: set calibration to one of {names}")
        return fitting[0]

    def _misfit(self, facts: CalibrationFacts, model: str) -> str:
        if facts.method != self.name or facts.settings != self.calibrated_settings:
            return f"its calibration is for {_listed(facts.settings)}, not {_listed(self.calibrated_settings)}"
        return "" if facts.model == model else "its calibration is of another model"

    def _command(self, source: str) -> str:
        changed = {name: value for name, value in self.calibrated_settings.items() if name != "bits"}
        options = [f"--{name} {value}" for name, value in changed.items() if value != getattr(KVQuant, name)]
        return " ".join(["kvsweep calibrate", source, "--text FILE", f"--bits {self.bits}", *options])

    def tables(self, layout: CacheLayout) -> list[LayerTables]:
        """One for each growing layer. Raises :class:`NotCalibrated` where they are of other shapes."""
        from kvcache.calibration import read_tables
        from kvcache.dense_sparse import LayerTables

        if not self.calibration:
            raise NotCalibrated("kvquant needs a calibration: a file that `kvsweep calibrate` wrote")
        found, names = read_tables(Path(self.calibration)), LayerTables.__dataclass_fields__
        if found.keys() != {f"{place}.{name}" for place in layout.growing for name in names}:
            raise NotCalibrated(f"{self.calibration} is of another model: its layers are others")
        tables = [LayerTables(**{name: found[f"{place}.{name}"] for name in names}) for place in layout.growing]
        for place, table in zip(layout.growing, tables, strict=True):
            layer = layout.layers[place]
            sizes = len(table.key_low), len(table.key_codebook)
            if sizes != (layer.kv_heads * layer.key_dim, 2**self.bits):
                raise NotCalibrated(f"{self.calibration} is of another model or number of bits: see layer {place}")
        return tables

    # -- the cache -----------------------------------------------------------------------------------------------------

    def unsuited(self, layer: LayerLayout) -> str | None:
        for channels in (layer.kv_heads * layer.key_dim, layer.kv_heads * layer.value_dim):
            if channels % 8 or channels > MOST_CHANNELS:
                return f"kvquant codes a token's channels by eights, {MOST_CHANNELS} at most: {channels} do not fit"
        return None

    def layer_bytes(self, prompt_tokens: int, new_tokens: int, layer: LayerLayout, element_bytes: int) -> int:
        tokens = prompt_tokens + new_tokens
        sinks = min(self.sinks, tokens)
        return sinks * layer.token_bytes(element_bytes) + (tokens - sinks) * self.grid.token_bytes(layer)

    def compress(self, prefill: Prefill, budget: ResolvedBudget, examined: Any) -> Compressed:
        from kvcache.pool import Compressed

        self.tables(prefill.layout)
        path = Path(self.calibration)
        facts = read_facts(path)
        told = {
            "calibration": content_digest(path),
            "calibration_tokens": facts.sequences * facts.tokens,
            "codebooks": "weighted" if facts.weighted else "unweighted",
        }
        return Compressed(prefill, facts=told)

    def new_pool(self, shape: PoolShape) -> FamilyPool:
        from kvcache.nonuniform import NonUniformPool

        return NonUniformPool(shape, self.grid, self.tables(shape.layout))


def _listed(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())
