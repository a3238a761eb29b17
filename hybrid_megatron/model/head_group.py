"""The heads of one mixer in one layer: the unit in which a layer plan speaks, and what a mixer is built from."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Inference:
    """What heads compute otherwise than in training, on inputs longer than they were trained on; see model/inference.py."""

    trained_context: int = 0
    """Tokens a sample had in training."""
    logit_scale: str = "none"
    """none, log, hype or constant: factor on the logits of attention without position."""
    logit_scale_value: float | None = None
    """hype: the base a. constant: the factor."""
    dynamic_ntk: bool = False
    """Stretch RoPE to the length of the input."""
    window: int | None = None
    """Tokens that full attention sees."""
    swla_window: int | None = None
    """Tokens that a linear mixer's state reaches back over, at most; in steps of `swla_stride`."""
    swla_stride: int | None = None


@dataclass(frozen=True)
class HeadGroup:
    """Heads of one layer that mix tokens in the same way."""

    mixer: str
    position: str
    """rope or nope."""
    heads: int
    """Query heads."""
    inference: Inference = Inference()

    def __str__(self) -> str:
        """E.g. 'attention (nope)'."""
        return f"{self.mixer} ({self.position})"
