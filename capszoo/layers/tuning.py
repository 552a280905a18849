"""The measured thresholds of the engines, in one place.

An engine's ``unprofitable`` compares with them and names them in its reason. docs/dev/performance.md states the command
and the machine of each under the engine's heading.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

__all__ = ["TUNING", "Tuning", "tuned"]


@dataclass(frozen=True)
class Tuning:
    """Every measured threshold of the engines."""

    # IDPA
    #: votes (numbers in them) of a layer from which it works in blocks; fewer fit the caches as they are
    idpa_blocked_min_votes: int = 1 << 20
    #: columns of a child's pose up to which votes cost less to recompute in each iteration than to keep
    idpa_blocked_max_inner: int = 16
    #: votes (numbers) of a block, for each thread; two such buffers fill half of a 2 MiB cache
    idpa_block_votes: int = 1 << 17
    #: votes (numbers) of an image in one chunk of an exported graph
    idpa_chunk_votes: int = 1 << 20

    # Dynamic routing
    #: images (or windows) from which it goes without votes: the rows of its products, and of a block of them
    dynamic_vote_free_min_routings: int = 16
    #: child pose dimension up to which keys, which have as many numbers as that, cost less than votes
    dynamic_vote_free_max_child_dim: int = 15
    #: numbers in the keys of all images from which it goes without votes
    dynamic_vote_free_min_keys: int = 1 << 17
    #: numbers in the keys of one image up to which it does, so that no block takes much memory
    dynamic_vote_free_max_keys: int = 1 << 20
    #: numbers in the keys of a block (8 MiB in float32); the backward pass has four times as many at a time
    dynamic_vote_free_block_keys: int = 1 << 21
    #: child pose dimension from which votes are formed for some images at a time
    dynamic_blocked_min_child_dim: int = 16
    #: votes (numbers in them) from which they are; fewer at once are memory that a process reuses as it is
    dynamic_blocked_min_votes: int = 1 << 23
    #: votes (numbers) of an image up to which they are: blocks of few images read all weights for each block
    dynamic_blocked_max_image_votes: int = 1 << 19
    #: votes (numbers) of a block; smaller ones pay more for each call than they save
    dynamic_block_votes: int = 1 << 21

    # EM routing
    #: votes (numbers) of a block of windows, and from which there are blocks (8 MiB in float32): each block reads the
    #: transforms and takes a hundred small steps, of which fewer and larger blocks save both
    em_block_votes: int = 1 << 21
    #: votes (numbers) of an image in one chunk of an exported graph
    em_chunk_votes: int = 1 << 17
    #: numbers in the largest temporary of a step in blocks (2 MiB in float32, what a core's own cache holds)
    em_shared_block_numbers: int = 1 << 19

    # capConv
    #: elements of the maps of one branch in a block of images (2 MiB in float32)
    capconv_block_elements: int = 1 << 19
    #: elements of the maps of all images from which blocks pay without gradients too
    capconv_recompute_min_elements: int = 1 << 18


#: The thresholds in force; :func:`tuned` changes them for a while.
TUNING = Tuning()


@contextmanager
def tuned(**values: int) -> Iterator[None]:
    """Inside, these thresholds of :data:`TUNING` have other values: for tests and benchmarks."""
    changed, before = vars(replace(TUNING, **values)).copy(), vars(TUNING).copy()
    try:
        vars(TUNING).update(changed)
        yield
    finally:
        vars(TUNING).update(before)
