"""Triton's hash of itself, which it asks for before its first kernel: made once, and early.

Hundreds of megabytes are read and hashed in pieces, between which the GIL is taken: 0.4 s where it
is free, and every thread that asks before the first one is done does the same. So threads come here
first, where one does it and the others wait.
"""

from __future__ import annotations

from threading import Lock

_hashing = Lock()


def hash_compiler() -> None:
    """Triton keeps it. Before 3.5 it is elsewhere, and without Triton nobody needs it."""
    with _hashing:
        try:
            from triton.runtime.cache import triton_key
        except ImportError:
            return
        triton_key()
