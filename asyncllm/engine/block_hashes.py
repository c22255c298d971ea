"""Block hashes for the prefix cache: H(the block's token ids, hash of the block before).

The first block's parent is the request's cache key. So a hash covers all that a block's KV depends
on, and blocks with equal hashes may share a page. Each hash is computed once per sequence, on
demand: a long prompt whose beginning is not cached is not hashed. The hash is keyed with a secret
of the process, so that no client can construct a collision.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array

from asyncllm.types import Sequence

HASH_BYTES = 16


class BlockHashes:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._known: dict[int, list[bytes]] = {}  # by seq_id
        self._keyed = hashlib.blake2b(digest_size=HASH_BYTES, key=secrets.token_bytes(32))

    def known(self, seq: Sequence) -> list[bytes]:
        """The hashes computed so far, of its first blocks."""
        return self._known.get(seq.seq_id, [])

    def first(self, seq: Sequence, num_blocks: int) -> list[bytes]:
        """Hashes of at least the first `num_blocks` blocks, whose tokens must be known."""
        hashes = self._known.setdefault(seq.seq_id, [])
        first, size = len(hashes), self._block_size
        if first >= num_blocks:
            return hashes
        end = num_blocks * size
        assert end <= len(seq.token_ids), "hash of tokens that are not known yet"
        parent = hashes[-1] if hashes else seq.request.cache_key
        tokens = array("i", seq.token_ids[first * size : end])
        block_bytes, tokens_bytes = size * tokens.itemsize, tokens.tobytes()
        for start in range(0, len(tokens_bytes), block_bytes):
            digest = self._keyed.copy()
            digest.update(tokens_bytes[start : start + block_bytes] + parent)
            parent = digest.digest()
            hashes.append(parent)
        return hashes

    def fork(self, parent: Sequence, child: Sequence) -> None:
        self._known[child.seq_id] = list(self.known(parent))

    def forget(self, seq: Sequence) -> None:
        self._known.pop(seq.seq_id, None)

    def check_empty(self) -> None:
        """Assert that no sequence is known."""
        assert not self._known, f"hashes of finished sequences: {sorted(self._known)}"
