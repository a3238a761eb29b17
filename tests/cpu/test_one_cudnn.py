"""Where Transformer Engine is installed it finds the cuDNN that torch has loaded, whatever else there is."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from hybrid_megatron.platform import one_cudnn
from hybrid_megatron.platform.one_cudnn import folder_of_library, share_cudnn_of_torch

MAPS = """\
7f0000000000-7f0000001000 r-xp 00000000 08:01 11                         /usr/lib/libcudnn_graph.so.9
7f0000001000-7f0000002000 rw-p 00000000 00:00 0
7f0000002000-7f0000003000 r-xp 00000000 08:01 12                         /my torch/nvidia/cudnn/lib/libcudnn.so.9
7f0000003000-7f0000004000 rw-p 00000000 00:00 0                          [heap]
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


def test_folder_of_a_loaded_library():
    assert folder_of_library("libcudnn.so", MAPS) == "/my torch/nvidia/cudnn/lib"
    assert folder_of_library("libcublas.so", MAPS) is None


@linux
def test_a_library_of_this_process():
    assert list(Path(folder_of_library("libc.so", Path("/proc/self/maps").read_text())).glob("libc.so*"))


@linux
@pytest.mark.parametrize("installed", [True, False])
def test_told_where_transformer_engine_is(monkeypatch, installed):
    monkeypatch.setenv("CUDNN_HOME", "/usr/local/cuda")
    monkeypatch.setattr(one_cudnn, "find_spec", lambda name: importlib.util.find_spec("torch") if installed else None)
    monkeypatch.setattr(one_cudnn, "folder_of_library", lambda name, maps: folder_of_library(name, MAPS))
    share_cudnn_of_torch()
    assert os.environ["CUDNN_HOME"] == ("/my torch/nvidia/cudnn/lib" if installed else "/usr/local/cuda")
