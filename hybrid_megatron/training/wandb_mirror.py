"""The wandb run of a run folder, a mirror of its metrics.jsonl: one wandb run a folder, whatever number of jobs it takes.

Online, a resumed run goes on where the server's copy ends, and what earlier jobs had not sent is sent then. Offline, each start writes a
folder of its own, wandb/offline-run-*-ID, and `wandb sync` puts all of one id into one run, in order of their starts; what the files of
earlier starts lack is written into the next one's.

wandb works in a process of its own, which dies of the signals that Slurm sends to all processes of a job (SIGTERM, SIGINT), with what it
has not written. The end of a run, when the checkpoint is safe, starts it again and hands it what it lacks.
"""

import contextlib
import dataclasses
import netrc
import os
import shlex
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from hybrid_megatron.code_version import ROOT
from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.training.run_folder import RunFolder
from hybrid_megatron.training.wandb_files import recorded_steps

_INIT_SECONDS = 60.0
"""How long a server may take to answer, before the run is mirrored offline."""
_FINISH_SECONDS = 60.0
"""How long the end of a run waits for the last lines to be sent: a job near its time limit has little time."""


class WandbMirror:
    """Used by rank 0 alone. Whatever fails in wandb is a warning and the end of the mirror, never of the run."""

    def __init__(self, config: RunConfig, folder: RunFolder, facts: dict, lines: Callable[[], list[dict]]):
        """`lines` reads those of metrics.jsonl; `facts` stand beside the recipe."""
        self.folder, self.run_id, self.lines = folder.path / "wandb", folder.run_id, lines
        self.run, self.offline, self.lost = None, False, None
        if config.tracking.wandb == "disabled":
            return
        try:
            import wandb
        except Exception as error:  # not installed, or beside packages that it does not go with
            warnings.warn(
                f"wandb cannot be imported ({_first_line(error)}), so this run is not mirrored there; metrics.jsonl has everything "
                "(tracking.wandb=disabled says so)"
            )
            return
        self._start_again = lambda: self._start(wandb, config, folder, facts)
        self._start_again()
        self._act(self._send_what_is_missing)

    def log(self, line: dict[str, float]) -> None:
        if self.lost is None:
            self._act(lambda: self._log(line), self._lose)

    def _log(self, line: dict[str, float]) -> None:
        # Online by wandb's own count of steps, since it drops what does not rise above that and a run may be set back; the charts go by
        # `step`. Offline that count begins anew with each start, so our own takes its place: rows of two starts must not get one number.
        self.run.log(line, step=line["step"] if self.offline else None)

    def finish(self, exit_code: int) -> None:
        if self.lost is None:
            self._act(lambda: self.run.finish(exit_code=exit_code), self._lose)
        if self.lost is not None:
            self._begin_anew(exit_code)

    def _lose(self, error: Exception) -> None:
        self.lost = error

    def _begin_anew(self, exit_code: int) -> None:
        """With a new process of wandb's, which is told what the files of the old one, or the server, lack."""
        import wandb

        with contextlib.suppress(Exception, SystemExit):
            wandb.teardown()
        self.run = None
        self._start_again()
        self._act(self._send_what_is_missing)
        self._act(lambda: self.run.finish(exit_code=exit_code))

    @property
    def sync_command(self) -> str | None:
        """What uploads an offline run, if it is one."""
        if not self.offline:
            return None
        program = Path(sys.executable).with_name("wandb")
        return shlex.join([str(program) if program.is_file() else "wandb", "sync", str(self.folder)])

    def _start(self, wandb, config: RunConfig, folder: RunFolder, facts: dict) -> None:
        mode = config.tracking.wandb
        if mode == "auto":
            mode = os.environ.get("WANDB_MODE") or ("online" if _logged_in() else "offline")
        try:
            try:
                self.run = _init(wandb, config, folder, facts, mode)
            except Exception as error:
                if mode != "online":
                    raise
                warnings.warn(f"wandb does not start online ({_first_line(error)}), so this run is mirrored offline")
                mode = "offline"
                with contextlib.suppress(Exception, SystemExit):
                    wandb.teardown()  # its service still holds the id, and would refuse it as one in use
                self.run = _init(wandb, config, folder, facts, mode)
            self.offline = mode == "offline"
        except Exception as error:  # no permission, a full disk: none of them is a reason not to train
            warnings.warn(f"wandb does not start ({_first_line(error)}), so this run is not mirrored there; metrics.jsonl has everything")

    def _send_what_is_missing(self) -> None:
        """What an earlier start, or an earlier process of wandb's, had not sent or written before it ended."""
        if self.offline:
            there = recorded_steps(self.folder, self.run_id)
            missing = [line for line in self.lines() if line["step"] not in there]
        else:
            last = self.run.summary.get("step", 0) if self.run.resumed else 0
            missing = [line for line in self.lines() if line["step"] > last]
        for line in missing:
            self._log(line)

    def _act(self, act: Callable[[], None], otherwise: Callable[[Exception], None] | None = None) -> None:
        if self.run is None:
            return
        try:
            act()
        except Exception as error:  # of wandb's own, of its service process, of the network or the disk
            (otherwise or self._give_up)(error)

    def _give_up(self, error: Exception) -> None:
        warnings.warn(
            f"wandb failed ({_first_line(error)}), so it has no more of this run; metrics.jsonl has everything, and the next start sends "
            "what is missing"
        )
        self.run = None


def _init(wandb, config: RunConfig, folder: RunFolder, facts: dict, mode: str):
    tracking = config.tracking
    settings = wandb.Settings(
        silent=True,
        console="off",
        init_timeout=_INIT_SECONDS,
        finish_timeout=_FINISH_SECONDS,
        finish_timeout_raises=True,
        disable_git=not (ROOT / ".git").exists(),  # else the repository around a copy of the code would be taken for its own
    )
    run = wandb.init(
        project=tracking.project,
        entity=tracking.entity,
        name=folder.path.name,
        id=folder.run_id,
        resume="allow",
        group=tracking.group,
        job_type=tracking.job_type,
        tags=tracking.tags,
        config=dataclasses.asdict(config) | {"run_facts": facts},
        dir=str(folder.path),
        mode=mode,
        settings=settings,
    )
    run.define_metric("*", step_metric="step")  # `tokens` is in every line too, and can be chosen as the axis of any chart
    run.summary.update(facts)
    return run


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _logged_in() -> bool:
    """Whether wandb would find a key: in the environment, or in the netrc file that `wandb login` writes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
