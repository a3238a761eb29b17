"""Collects the largest differences that the parity tests saw, as tables."""

import time

import torch

TINY = "tiny recipe"
_CASES = ("whole samples", "documents")


class ParityTable:
    def __init__(self):
        self.cells: dict[tuple[str, str, str], tuple[float, float | None]] = {}

    def note(self, model: str, layout: str, case: str, loss: float, gradient: float | None) -> None:
        """Largest difference of the loss (nats a token) and of a parameter's gradient (relative), of `model` under `layout` in `case`."""
        self.cells[model, layout, case] = loss, gradient

    def markdown(self, where: str = "on CPUs over gloo", bounds: str = "1e-5 and 1e-4", precision: str = "float32") -> str:
        when = f"Measured {time.strftime('%Y-%m-%d')} with torch {torch.__version__.split('+')[0]} {where}, {precision}."
        parts = [when + " Loss: difference in nats a token; gradients: largest relative difference of any parameter's."]
        if any(model == TINY for model, _, _ in self.cells):
            parts.append(self._tiny())
        if any(model != TINY for model, _, _ in self.cells):
            parts.append(self._matrix())
        parts.append(f"{self._worst()}. Bounds: {bounds}.")
        return "\n\n".join(parts) + "\n"

    def _tiny(self) -> str:
        """The tiny recipe: a row a layout."""
        lines = [
            "Two GDN and two attention layers (tests/cpu/tiny.py). One step: loss / gradients. Twenty steps with the distributed "
            "optimizer: largest difference of a loss.",
            "",
            "| layout against one process | one step | one step, documents masked | twenty steps |",
            "| --- | ---: | ---: | ---: |",
        ]
        for layout in self._layouts([TINY]):
            cells = [_both(self.cells.get((TINY, layout, case))) for case in _CASES]
            twenty = self.cells.get((TINY, layout, "20 steps"))
            cells.append(f"{twenty[0]:.1e}" if twenty else "")
            lines.append(f"| {layout} | " + " | ".join(cells) + " |")
        return "\n".join(lines)

    def _matrix(self) -> str:
        """All mixers: a row a layout, a column a model; each cell the worse of whole samples and masked documents."""
        models = list(dict.fromkeys(model for model, _, _ in self.cells if model != TINY))
        lines = [
            "Every mixer beside attention without position at 3:1, in layers of its own (LH) or in heads of every layer (HH), and models "
            "of all of them (tests/cpu/zoo.py). One step, loss / gradients, the worse of whole samples and masked documents.",
            "",
            "| against one process | " + " | ".join(models) + " |",
            "| --- |" + " ---: |" * len(models),
        ]
        for layout in self._layouts(models):
            lines.append(f"| {layout} | " + " | ".join(_both(self._worse(model, layout)) for model in models) + " |")
        return "\n".join(lines)

    def _layouts(self, models: list[str]) -> list[str]:
        return list(dict.fromkeys(layout for model, layout, _ in self.cells if model in models))

    def _worse(self, model: str, layout: str) -> tuple[float, float] | None:
        seen = [self.cells[model, layout, case] for case in _CASES if (model, layout, case) in self.cells]
        return (max(loss for loss, _ in seen), max(gradient for _, gradient in seen)) if seen else None

    def _worst(self) -> str:
        by_loss = max(self.cells, key=lambda cell: self.cells[cell][0])
        with_gradients = {cell: seen[1] for cell, seen in self.cells.items() if seen[1] is not None}
        said = f"Worst of {len(self.cells)} cells: loss {self.cells[by_loss][0]:.1e} ({', '.join(by_loss)})"
        if with_gradients:
            worst = max(with_gradients, key=with_gradients.get)
            said += f"; gradients {with_gradients[worst]:.1e} ({', '.join(worst)})"
        return said


def _both(seen: tuple[float, float] | None) -> str:
    return "/".join(f" {value:.1e} " for value in seen).strip() if seen else ""
