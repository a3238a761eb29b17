"""Network: interfaces as NCCL will look for them, InfiniBand ports, and wandb's server where a run would talk to it."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from hybrid_megatron.preflight.agreement import named, odd_ones
from hybrid_megatron.preflight.finding import Finding, Level, fine

_CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class Network:
    """Of one node."""

    interfaces: tuple[str, ...]
    """That are up, loopback left out."""
    wanted: str
    """NCCL_SOCKET_IFNAME."""
    active_ports: int
    """InfiniBand (or RoCE) ports that are up."""

    @property
    def infiniband(self) -> bool:
        return self.active_ports > 0


def gather_network(root: Path = Path("/sys/class")) -> Network:
    """`root`: where the kernel shows its devices."""
    return Network(
        tuple(sorted(each.name for each in _folders(root / "net") if each.name != "lo" and _text(each / "operstate") in ("up", "unknown"))),
        os.environ.get("NCCL_SOCKET_IFNAME", ""),
        sum("ACTIVE" in _text(port / "state") for device in _folders(root / "infiniband") for port in _folders(device / "ports")),
    )


def judge_network(networks: dict[str, Network]) -> list[Finding]:
    if len(networks) == 1:
        return []
    findings = []
    without = [node for node, each in networks.items() if each.wanted and not matching(each.wanted, each.interfaces)]
    if without:
        each = networks[without[0]]
        found = (
            f"NCCL_SOCKET_IFNAME={each.wanted} names no interface that is up on {named(without)} ({', '.join(each.interfaces) or 'none'})"
        )
        if len(without) == len(networks):
            findings.append(Finding("network", Level.REFUSED, found, way_out="name one of these, or leave it out"))
        else:
            findings.append(Finding("network", Level.BAD_NODE, found, way_out="ip link there shows why", nodes=tuple(without)))
    usual, odd = odd_ones({node: each.active_ports for node, each in networks.items()})
    if odd:
        found = ", ".join(f"{node} has {count} InfiniBand ports up" for node, count in odd.items())
        findings.append(Finding("network", Level.WARNING, f"{found}, the others {usual}", "all-reduces go at its pace", "ibstat there"))
    return findings or [fine("network", f"{usual} InfiniBand ports up on each node" if usual else "no InfiniBand, TCP between nodes")]


def matching(wanted: str, interfaces: tuple[str, ...]) -> list[str]:
    """By NCCL's rules: prefixes joined by commas; `=` before them asks for whole names, `^` for all others."""
    exact, other = "=" in wanted[:2], wanted.startswith("^")
    names = wanted.lstrip("^=").split(",")
    return [each for each in interfaces if any(each == name if exact else each.startswith(name) for name in names) != other]


def unreachable(base_url: str = "https://api.wandb.ai", seconds: float = _CONNECT_SECONDS) -> str:
    """Why wandb's server, or the proxy that stands before it, cannot be reached from here; empty if it can."""
    url = urlsplit(os.environ.get("https_proxy") or os.environ.get("HTTPS_PROXY") or os.environ.get("WANDB_BASE_URL") or base_url)
    port = url.port or (80 if url.scheme == "http" else 443)
    try:
        socket.create_connection((url.hostname or "", port), timeout=seconds).close()
    except OSError as error:
        return f"{url.hostname}:{port} cannot be reached ({error.strerror or error})"
    return ""


def judge_wandb(mode: str, problem: str, node: str) -> list[Finding]:
    """`mode`: what the run's wandb will be, asked on the first rank's node."""
    if problem:
        rule = f"wandb would be {mode} for this run"
        way_out = "set tracking.wandb=offline, and run wandb sync RUN_DIR/wandb/offline-run-* from a machine with a network"
        return [Finding("wandb", Level.WARNING, f"{problem} from {node}", rule, way_out)]
    return [fine("wandb", mode)]


def _folders(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() else []


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
