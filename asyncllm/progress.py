"""The progress bar of everything that takes more than two seconds at the start."""

from __future__ import annotations

from tqdm import tqdm

DELAY_S = 2.0


class ProgressBar(tqdm):
    """Shown after DELAY_S, removed at its end, and without tqdm's monitor thread, which would
    outlive the engine."""

    monitor_interval = 0
