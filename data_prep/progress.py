"""A line on stderr that says how far a job is and how fast."""

import sys
import time


def human_bytes(count: float) -> str:
    """12.3 MB and the like; powers of 1,000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def human_seconds(seconds: float) -> str:
    """45 s, 3:20 min, 5:02 h; the two largest units."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"


class Progress:
    """On a terminal one line, renewed twice a second; elsewhere (a log file) a line every 15 seconds."""

    def __init__(self, label: str, total_bytes: int):
        self.label, self.total_bytes = label, total_bytes
        self.started = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._interval = 0.5 if self._terminal else 15.0
        self._next = self.started + self._interval
        self._shown = False

    def seconds(self) -> float:
        return time.monotonic() - self.started

    def update(self, read_bytes: int, documents: int | None = None, tokens: int | None = None) -> None:
        """Show the state if it is time. `read_bytes` counts bytes of the input files as they lie on disk."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._interval
        seconds = now - self.started
        if self.total_bytes:
            parts = [f"{self.label}: {100 * read_bytes / self.total_bytes:.0f}% of {human_bytes(self.total_bytes)}"]
        else:  # standard input
            parts = [f"{self.label}: {human_bytes(read_bytes)}"]
        if documents is not None:
            parts.append(f"{documents:,} documents")
        if tokens is not None:
            parts.append(f"{tokens:,} tokens, {tokens / seconds:,.0f} tokens/s")
        parts.append(f"{human_bytes(read_bytes / seconds)}/s")
        if self.total_bytes and read_bytes:
            parts.append(f"{human_seconds(seconds * max(self.total_bytes - read_bytes, 0) / read_bytes)} left")
        line = ", ".join(parts)
        print(f"\r\x1b[K{line}" if self._terminal else line, end="" if self._terminal else "\n", file=sys.stderr, flush=True)
        self._shown = True

    def close(self) -> None:
        """Leave the terminal's line clean for what follows."""
        if self._terminal and self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
