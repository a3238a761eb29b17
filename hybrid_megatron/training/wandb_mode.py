"""Whether the wandb run of a recipe is online."""

import netrc
import os
from urllib.parse import urlsplit

API = "https://api.wandb.ai"


def wandb_mode(setting: str) -> str:
    """What `tracking.wandb` comes to on this machine: online, offline or disabled."""
    if setting != "auto":
        return setting
    return os.environ.get("WANDB_MODE") or ("online" if logged_in() else "offline")


def logged_in() -> bool:
    """Whether wandb would find a key: in the environment, or in the netrc file that `wandb login` writes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", API)).hostname
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
