"""Names in the measures of LORE-KV's diagnostics, for those who make them and those who read them. Torch-free."""

from __future__ import annotations

ORACLE = "oracle"
"""The condition that keeps what the control's cost asks for at the true future queries."""
REFERENCE = "reference"
"""The condition of measures that belong to queries, not to kept sets."""
WINDOW = 0
"""The parameter of ``coverage`` that stands for the prompt's window: no future."""
