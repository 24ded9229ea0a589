"""The report as a browser lays it out: nothing is cut off, nothing is fetched, and plots have ink.

Pictures go to ``KVSWEEP_TEST_PICTURES``, where that is set.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from browser import chromium
from PIL import Image
from row_factory import make_output

from pipeline.report import build_report

MEASURE = """<script>
const outside = [];
for (const svg of document.querySelectorAll('svg.plot')) {
  const frame = svg.getBoundingClientRect();
  for (const text of svg.querySelectorAll('text')) {
    const box = text.getBoundingClientRect();
    if (box.left < frame.left - 2 || box.right > frame.right + 2 || box.top < frame.top - 2 ||
        box.bottom > frame.bottom + 2) outside.push(text.textContent);
  }
}
const size = text => parseFloat(getComputedStyle(text).fontSize) * text.ownerSVGElement.getBoundingClientRect().width /
  text.ownerSVGElement.viewBox.baseVal.width;
const letters = [...document.querySelectorAll('svg.plot text')].map(size);
const found = {outside, wide: document.documentElement.scrollWidth - innerWidth,
  smallest: Math.min(...letters), largest: Math.max(...letters), plots: document.querySelectorAll('svg.plot').length,
  fetched: performance.getEntriesByType('resource').map(one => one.name)};
document.body.innerHTML = '<pre id="found">' + JSON.stringify(found) + '</pre>';
</script>"""


@pytest.fixture(scope="module")
def browser() -> str:
    return chromium()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Long names and many tasks, as in the papers' sweeps."""
    tasks = ("narrativeqa", "qasper", "hotpotqa", "gov_report", "passage_retrieval_en", "niah_multikey_1", "vt", "cwe")
    methods = ("streaming_llm", "layer_defensivekv", "qevict", "a method with a name as long as labels get")
    made = build_report(*make_output(methods, ("5%", "10%", "128 tokens"), tasks, samples=8))
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(made.html(), encoding="utf-8")
    return file


def run(browser: str, profile: Path, *words: str) -> str:
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    options += [
        "--disable-background-networking",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={profile}",
    ]
    done = subprocess.run([browser, *options, *words], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def measured(browser: str, page: Path, width: int, profile: Path) -> dict[str, Any]:
    """What a script at the end of a copy of the page finds."""
    copy = page.with_name(f"measured-{width}.html")
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", f"{MEASURE}</body>"), encoding="utf-8")
    dom = run(browser, profile, f"--window-size={width},1000", "--dump-dom", copy.as_uri())
    (found,) = re.findall(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)
    return dict(json.loads(unescape(found)))


@pytest.mark.parametrize("width", [1400, 900])
def test_no_label_is_cut_and_the_page_is_no_wider_than_its_window(
    browser: str, page: Path, width: int, tmp_path: Path
) -> None:
    found = measured(browser, page, width, tmp_path)
    assert found["plots"] == 6
    assert found["outside"] == []
    assert found["wide"] <= 0
    assert found["fetched"] == []
    if width == 1400:
        assert 8 <= found["smallest"] <= found["largest"] <= 16


def test_a_picture_of_the_page_has_its_colours(browser: str, page: Path, tmp_path: Path) -> None:
    picture = Path(os.environ.get("KVSWEEP_TEST_PICTURES", tmp_path)) / "sweep-report.png"
    run(browser, tmp_path / "profile", f"--screenshot={picture}", "--window-size=1400,4000", page.as_uri())
    with Image.open(picture) as shown:
        colours = {colour for _, colour in shown.convert("RGB").getcolors(maxcolors=1 << 24)}
        assert shown.size == (1400, 4000)
    assert {(0x3F, 0x83, 0xC9), (0xE0, 0x7B, 0x39)} <= colours  # the first two methods'
