"""What an evaluation found: as plain data for JSON, and as a table for people."""

import dataclasses
import hashlib
import time
from pathlib import Path

from hybrid_megatron import platform
from hybrid_megatron.checkpoint.integrity import HASHES
from hybrid_megatron.checkpoint.store import Progress
from hybrid_megatron.config import EvaluationConfig, RunConfig
from hybrid_megatron.evaluation.held_out import HeldOut
from hybrid_megatron.evaluation.loss_by_position import LossByPosition
from hybrid_megatron.model.pattern import LayerPlan
from hybrid_megatron.parallel import ParallelState


@dataclasses.dataclass
class Report:
    """Written as it stands; every value is plain data."""

    name: str
    run: dict
    """name, folder, trained_context (tokens a sample had in training), layers (the plan in words), document_mask."""
    checkpoint: dict
    """name, step, tokens (trained on), fingerprint (SHA-256 of its list of hashes)."""
    data: dict
    """prefix, fingerprint of its tokens, whole_documents."""
    settings: dict
    """The evaluation's settings, resolved."""
    device: dict
    """name, processes, layout."""
    date: str
    """ISO 8601, of the start."""
    lengths: list[dict] = dataclasses.field(default_factory=list)
    """By length: length, multiple (of the training length), samples, tokens (predicted), loss (nats a token), perplexity, and positions:
    edges [n + 1], loss [n] and tokens [n] of the positions between two edges (loss_by_position.bucket_edges)."""

    @classmethod
    def of(
        cls,
        run_dir: Path,
        config: RunConfig,
        settings: EvaluationConfig,
        plan: LayerPlan,
        checkpoint: Path,
        progress: Progress,
        data: HeldOut,
        state: ParallelState,
    ) -> "Report":
        return cls(
            name=settings.name,
            run={
                "name": config.name,
                "folder": str(run_dir.resolve()),
                "trained_context": config.train.context,
                "layers": str(plan),
                "document_mask": config.data.document_mask,
            },
            checkpoint={
                "name": checkpoint.name,
                "step": progress.step,
                "tokens": progress.tokens,
                "fingerprint": hashlib.sha256((checkpoint / HASHES).read_bytes()).hexdigest(),
            },
            data={"prefix": settings.data, "fingerprint": data.stream.fingerprint, "whole_documents": settings.whole_documents},
            settings=dataclasses.asdict(settings),
            device={"name": platform.device_name(), "processes": state.world_size, "layout": state.layout},
            date=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        )

    def add(self, result: LossByPosition, trained_context: int) -> None:
        edges, loss, tokens = result.buckets()
        self.lengths.append(
            {
                "length": result.length,
                "multiple": result.length / trained_context,
                "samples": result.samples,
                "tokens": result.total,
                "loss": result.loss,
                "perplexity": result.perplexity,
                "positions": {"edges": edges, "loss": loss, "tokens": tokens},
            }
        )


class Narrator:
    """What a person sees while an evaluation works; one rank speaks."""

    def __init__(self, speaks: bool):
        self.speaks = speaks

    def begin(self, report: Report, tokens: int, longest: int) -> None:
        """`tokens` are predicted at the longest length."""
        run, checkpoint, device = report.run, report.checkpoint, report.device
        layout = " ".join(f"{name} {size}" for name, size in device["layout"].items())
        documents = ", whole documents" if report.data["whole_documents"] else ""
        self._say(f"run        {run['folder']}")
        self._say(
            f"checkpoint {checkpoint['name']} ({checkpoint['tokens']:,} tokens), trained at {run['trained_context']:,} tokens a sample"
        )
        self._say(f"layers     {run['layers']}")
        self._say(f"evaluation {report.name}")
        self._say(f"data       {report.data['prefix']}{documents}")
        if tokens != report.settings["tokens"]:
            asked = f"tokens={report.settings['tokens']}"
            self._say(f"tokens     {tokens:,} for {asked}: whole samples of {longest:,}, and no more than the data holds")
        self._say(f"device     {device['name']} x{device['processes']}, {report.settings['precision']}, layout: {layout}")
        self._say(f"\n{'length':>10} {'x training':>11} {'samples':>9} {'tokens':>12} {'loss':>9} {'perplexity':>12}")

    def measured(self, report: Report) -> None:
        """One line for the last length."""
        line = report.lengths[-1]
        self._say(
            f"{line['length']:>10,} {line['multiple']:>11g} {line['samples']:>9,} {line['tokens']:>12,} {line['loss']:>9.4f} "
            f"{line['perplexity']:>12,.3f}"
        )

    def end(self, files: list[Path]) -> None:
        self._say("")
        for path in files:
            self._say(f"written    {path}")

    def _say(self, text: str) -> None:
        if self.speaks:
            print(text, flush=True)
