"""Keeps megatron-core's remarks about software that this project does without away from the user. Errors still show."""

import logging
import warnings


def silence_megatron() -> None:
    """Must run before the first import of megatron.core, which warns about absent Transformer Engine, Apex and absl."""
    warnings.filterwarnings("ignore", module=r"megatron\.")
    logging.getLogger("megatron").setLevel(logging.ERROR)
