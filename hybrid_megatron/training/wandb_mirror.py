"""The wandb run of a run folder, a mirror of its metrics.jsonl: one wandb run a folder, whatever number of jobs it takes.

Online, a resumed run goes on where the server's copy ends, and what earlier jobs had not sent is sent then. Offline, each start writes a
folder of its own, wandb/offline-run-*-ID, and `wandb sync` puts all of one id into one run, in order of their starts.
"""

import contextlib
import dataclasses
import netrc
import os
import shlex
import sys
import warnings
from pathlib import Path
from urllib.parse import urlsplit

from hybrid_megatron.code_version import ROOT
from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.training.run_folder import RunFolder

_INIT_SECONDS = 60.0
"""How long a server may take to answer, before the run is mirrored offline."""
_FINISH_SECONDS = 60.0
"""How long the end of a run waits for the last lines to be sent: a job near its time limit has little time."""


class WandbMirror:
    """Used by rank 0 alone. Whatever fails in wandb is a warning and the end of the mirror, never of the run."""

    def __init__(self, config: RunConfig, folder: RunFolder, facts: dict, lines: list[dict]):
        """`lines` are those of metrics.jsonl up to where the run goes on; `facts` stand beside the recipe."""
        self.folder = folder.path / "wandb"
        self.run, self.offline = None, False
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
        self._start(wandb, config, folder, facts)
        self._act(lambda: self._send_again(lines))

    def log(self, line: dict[str, float]) -> None:
        # Online by wandb's own count of steps, since it drops what does not rise above that and a run may be set back; the charts go by
        # `step`. Offline that count begins anew with each start, so our own takes its place: rows of two starts must not get one number.
        self._act(lambda: self.run.log(line, step=line["step"] if self.offline else None))

    def finish(self, exit_code: int) -> None:
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

    def _send_again(self, lines: list[dict]) -> None:
        """What the server does not have: an earlier job was killed before it had sent it, or had no network."""
        if self.offline:
            return
        last = self.run.summary.get("step", 0) if self.run.resumed else 0
        for line in lines:
            if line["step"] > last:
                self.log(line)

    def _act(self, act) -> None:
        if self.run is None:
            return
        try:
            act()
        except Exception as error:  # of wandb's own, of its service process, of the network or the disk
            warnings.warn(
                f"wandb failed ({_first_line(error)}), so it has no more of this run; metrics.jsonl has everything, and the next start or "
                f"`wandb sync --include-online {self.folder / 'latest-run'}` sends what is missing"
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
