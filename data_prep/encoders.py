"""Which libraries can encode the vocabularies of tiktoken, and whether the faster one is installed."""

import importlib.metadata

ENCODERS = ("auto", "gigatoken", "tiktoken")
GIGATOKEN = "gigatoken==0.10.0"


def gigatoken_version() -> str | None:
    """None where it is not installed."""
    try:
        return importlib.metadata.version("gigatoken")
    except importlib.metadata.PackageNotFoundError:
        return None
