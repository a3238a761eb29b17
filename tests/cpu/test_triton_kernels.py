"""Our own Triton kernels where there is no GPU: Triton's interpreter runs them line by line, in a process of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_kernels_compute_what_they_should():
    """float32: roundings of exponents up to 100, 2^-24 each; bfloat16: one rounding, which the interpreter makes by cutting off: 2^-8 in
    the mean, 2^-7 against what is rounded to the nearest."""
    pytest.importorskip("triton")
    ended = subprocess.run(
        [sys.executable, "-m", "tests.cpu.interpreted_kernels"],
        cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    for case, errors in json.loads(ended.stdout.splitlines()[-1]).items():
        for name, error in errors.items():
            bound = {"gradient": 4e-3, "copies": 8e-3}.get(name, 2e-5) if "bfloat16" in case else 2e-5
            assert error <= bound, f"{case}, {name}: {error:.1e}"
