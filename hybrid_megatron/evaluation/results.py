"""The files of an evaluation: OUTPUT/CHECKPOINT/NAME.json and NAME.png. An evaluation of the same name replaces the earlier one."""

import dataclasses
import io
import json
import re
import warnings
from pathlib import Path

from hybrid_megatron.config.schema import EvaluationConfig, InferenceConfig
from hybrid_megatron.config.setting_types import as_written
from hybrid_megatron.errors import RunError
from hybrid_megatron.evaluation.plot import draw
from hybrid_megatron.evaluation.report import Report


def evaluation_name(settings: EvaluationConfig) -> str:
    """The settings that change what is measured or on which tokens: 'logit_scale=log,swla_window=4096', or 'plain'."""
    usual, asked = InferenceConfig(), settings.inference
    words = {field.name: getattr(asked, field.name) for field in dataclasses.fields(asked)}
    words = {name: value for name, value in words.items() if value != getattr(usual, name)}
    if settings.data is not None:
        words["data"] = Path(settings.data).name
    if settings.whole_documents:
        words["whole_documents"] = True
    if settings.precision is not None:
        words["precision"] = settings.precision
    if settings.lengths is not None:
        words["lengths"] = "-".join(map(str, settings.lengths))
    if settings.tokens != EvaluationConfig.tokens:
        words["tokens"] = settings.tokens
    return ",".join(f"{name}={_written(value)}" for name, value in words.items()) or "plain"


def _written(value) -> str:
    return f"{value:g}" if isinstance(value, float) else as_written(value)


def prepare_folder(folder: Path) -> None:
    """Make the folder; raises RunError before anything is measured for nothing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"output={folder.parent}: cannot write there ({error.strerror}); give another with output=PATH") from None


def write_results(folder: Path, report: Report) -> list[Path]:
    """Write both files, each as a whole or not at all; returns those written. Raises RunError if the numbers cannot be written."""
    numbers, picture = folder / f"{report.name}.json", folder / f"{report.name}.png"
    try:
        _write(numbers, (as_json(report) + "\n").encode())
    except OSError as error:
        raise RunError(f"{numbers}: cannot be written ({error.strerror}); mend that, or give another folder with output=PATH") from None
    image = io.BytesIO()
    draw(dataclasses.asdict(report), _comparable(folder, report), image)
    try:
        _write(picture, image.getvalue())
    except OSError as error:
        warnings.warn(f"{picture}: cannot be written ({error.strerror}); the numbers are in {numbers}")
        return [numbers]
    return [numbers, picture]


def as_json(report: Report) -> str:
    text = json.dumps(dataclasses.asdict(report), indent=1, allow_nan=False)
    return re.sub(r"\[[-+.\deE,\s]*\]", lambda numbers: " ".join(numbers.group().split()), text)  # numbers of one list on one line


def _write(path: Path, content: bytes) -> None:
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(content)
    new.replace(path)


def _comparable(folder: Path, report: Report) -> list[dict]:
    """Other evaluations in the folder that predicted the same tokens with the same parameters, at the lengths they share."""
    mine, found = dataclasses.asdict(report), []
    for path in sorted(folder.glob("*.json")):
        try:
            other = json.loads(path.read_text())
            if path.stem != report.name and _subject(other) == _subject(mine) and _same_tokens(other, mine):
                found.append(other)
        except (OSError, ValueError, KeyError, TypeError):
            warnings.warn(f"{path}: it holds no evaluation, so it is not in the plot")
    return found


def _subject(evaluation: dict) -> tuple:
    data = evaluation["data"]
    return evaluation["checkpoint"]["fingerprint"], data["fingerprint"], data["whole_documents"]


def _same_tokens(one: dict, other: dict) -> bool:
    counts = [{line["length"]: line["tokens"] for line in evaluation["lengths"]} for evaluation in (one, other)]
    return all(counts[0][length] == counts[1][length] for length in counts[0].keys() & counts[1].keys())
