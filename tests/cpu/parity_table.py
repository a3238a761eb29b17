"""Collects the largest differences that the parity tests saw, as a table."""

import time

import torch


class ParityTable:
    def __init__(self):
        self.rows: dict[str, dict[str, tuple[float, float | None]]] = {}

    def note(self, layout: str, what: str, loss: float, gradient: float | None) -> None:
        """Largest difference of the loss (nats a token) and of a parameter's gradient (relative), of `layout` in the case `what`."""
        self.rows.setdefault(layout, {})[what] = loss, gradient

    def markdown(self) -> str:
        cases = ("whole samples", "documents")
        lines = [
            f"Measured {time.strftime('%Y-%m-%d')} with torch {torch.__version__.split('+')[0]} on CPUs over gloo, float32; tiny model of "
            "two GDN and two attention layers (tests/cpu/tiny.py). One step: difference of the loss in nats / largest relative difference "
            "of any parameter's gradient. Twenty steps with the distributed optimizer: largest difference of a loss.",
            "",
            "| layout against one process | one step | one step, documents masked | twenty steps |",
            "| --- | ---: | ---: | ---: |",
        ]
        for layout, seen in self.rows.items():
            cells = ["/".join(f" {value:.1e} " for value in seen[case]).strip() if case in seen else "" for case in cases]
            cells.append(f"{seen['20 steps'][0]:.1e}" if "20 steps" in seen else "")
            lines.append(f"| {layout} | " + " | ".join(cells) + " |")
        return "\n".join(lines) + "\n"
