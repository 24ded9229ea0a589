"""The data sets that tasks read: what each is for, its licence, where it comes from, and the checksums it must have.

Paths are below a data folder. Every source is pinned: a commit of a repository or a revision of the Hub, and the sha256
of what it serves. What cannot be fetched says why and where to get it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tasks.groups import LONGBENCH, LONGBENCH_E

GITHUB = "https://raw.githubusercontent.com"
HUB = "https://huggingface.co"
"""Replaced by ``HF_ENDPOINT`` where that is set."""

_LONGBENCH_CODE = "THUDM/LongBench/2e00731f8d0bff23dc4325161044d0ed8af94c1e"
_LONGBENCH_DATA = "THUDM/LongBench/resolve/5e628be450b7e67fb7ae6e201bd6d8f7056f7672"
_GSM8K = "openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c"
_SQUAD = "rajpurkar/SQuAD-explorer/240e165ab706d95bd4323653bb92421f446208cf"
_HOTPOTQA = "RAGLAB/data/resolve/c33b09b7fa5099b89830e84f9bdff78329268d9b"


@dataclass(frozen=True)
class DataFile:
    """``url`` is empty for a member of its set's archive, and for what cannot be fetched."""

    path: str
    sha256: str | None = None
    url: str = ""


@dataclass(frozen=True)
class Archive:
    """A zip file; its members land below ``folder`` under their own names."""

    url: str
    sha256: str
    folder: str


@dataclass(frozen=True)
class DataSet:
    """``tasks`` are those that read it; ``by_hand`` says how to come by it where it cannot be fetched."""

    name: str
    use: str
    licence: str
    source: str
    files: tuple[DataFile, ...]
    tasks: tuple[str, ...]
    archive: Archive | None = None
    by_hand: str = ""

    def file(self, path: str) -> DataFile | None:
        return next((file for file in self.files if file.path == path), None)


_RULER = "RULER's tasks"

DATA_SETS: tuple[DataSet, ...] = (
    DataSet(
        name="longbench",
        use="LongBench and LongBench-E: the records",
        licence="each task's own, see the data set's card; some forbid redistribution",
        source="Hub THUDM/LongBench data.zip at 5e628be4 (114 MB)",
        files=tuple(DataFile(f"longbench/data/{name}.jsonl") for name in (*LONGBENCH, *LONGBENCH_E)),
        tasks=(*LONGBENCH, *LONGBENCH_E),
        archive=Archive(
            f"{HUB}/datasets/{_LONGBENCH_DATA}/data.zip",
            "cb45b11a4133c6bc1d6a44b0f8e701335ff1e543195db1103472e575857f7f64",
            "longbench",
        ),
    ),
    DataSet(
        name="longbench-config",
        use="LongBench: the official prompts and generation limits",
        licence="MIT",
        source="GitHub THUDM/LongBench at 2e00731f",
        files=(
            DataFile(
                "longbench/config/dataset2prompt.json",
                "56d22ad4f382169c2b8a11ff4c982a4a1bea096c8152b0f0b85b64686b157c30",
                f"{GITHUB}/{_LONGBENCH_CODE}/LongBench/config/dataset2prompt.json",
            ),
            DataFile(
                "longbench/config/dataset2maxlen.json",
                "72966b3c0933e214591637fb085798c5e687ebff4ddaab5d99bbc31120532022",
                f"{GITHUB}/{_LONGBENCH_CODE}/LongBench/config/dataset2maxlen.json",
            ),
        ),
        tasks=(*LONGBENCH, *LONGBENCH_E),
    ),
    DataSet(
        name="gsm8k",
        use="GSM8K: the test split",
        licence="MIT",
        source="GitHub openai/grade-school-math at 3101c7d5, the file behind the Hub's openai/gsm8k",
        files=(
            DataFile(
                "gsm8k/test.jsonl",
                "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
                f"{GITHUB}/{_GSM8K}/grade_school_math/data/test.jsonl",
            ),
        ),
        tasks=("gsm8k",),
    ),
    DataSet(
        name="gsm8k-exemplars",
        use="GSM8K with shots: 8: the exemplars of Wei et al. (2022)",
        licence="MIT",
        source="lm-evaluation-harness at 4e7e0d47, tasks/gsm8k/gsm8k-cot.yaml",
        files=(DataFile("gsm8k/cot_8shot.json"),),
        tasks=(),
        by_hand="write doc_to_text, target_prefix, separator, stop and samples of that file as JSON",
    ),
    DataSet(
        name="squad",
        use="RULER qa_1: documents and questions",
        licence="CC BY-SA 4.0",
        source="GitHub rajpurkar/SQuAD-explorer at 240e165a, dev set 2.0",
        files=(
            DataFile(
                "squad/dev-v2.0.json",
                "80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8",
                f"{GITHUB}/{_SQUAD}/dataset/dev-v2.0.json",
            ),
        ),
        tasks=("qa_1",),
    ),
    DataSet(
        name="hotpotqa",
        use="RULER qa_2: documents and questions",
        licence="CC BY-SA 4.0",
        source="Hub RAGLAB/data at c33b09b7, a mirror of the authors' dev set (distractor), whose own host is gone",
        files=(
            DataFile(
                "hotpotqa/hotpot_dev_distractor_v1.json",
                "4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea",
                f"{HUB}/datasets/{_HOTPOTQA}/eval_datasets/HotPotQA/hotpot_dev_distractor_v1.json",
            ),
        ),
        tasks=("qa_2",),
    ),
    DataSet(
        name="ruler-templates",
        use=f"{_RULER} in the official wording (else a wording of our own)",
        licence="Apache-2.0",
        source="NVIDIA/RULER at c3f5e3b4, scripts/data/synthetic/constants.py",
        files=(DataFile("ruler/templates.json"),),
        tasks=(),
        by_hand="write the templates and answer prefixes of that file as JSON",
    ),
    DataSet(
        name="haystack",
        use=f"{_RULER} and needle grids: running text (else sentences made from word lists)",
        licence="your text's",
        source="any text; published results rest on Paul Graham's essays, which carry no licence",
        files=(),
        tasks=(),
        by_hand="put UTF-8 text into haystack/*.txt",
    ),
)


def data_set_of(path: str) -> DataSet | None:
    """The set that a file below a data folder belongs to."""
    return next((entry for entry in DATA_SETS if entry.file(path)), None)


def fetchable(entry: DataSet) -> bool:
    return entry.archive is not None or any(file.url for file in entry.files)


def sets_for(name: str) -> Iterator[DataSet]:
    """The set of this name, else those of the task of this name; nothing for a name that means neither."""
    named = [entry for entry in DATA_SETS if entry.name == name]
    yield from named or (entry for entry in DATA_SETS if name in entry.tasks)
