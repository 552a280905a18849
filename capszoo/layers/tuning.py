"""The measured thresholds of the engines, in one place.

An engine's ``refusal`` compares with them and names them in its reason. docs/dev/engines.md has the
measurements, with command and machine, under the headings that comments below name. "Not on record" means that no
measurement of the value itself is kept.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tuning:
    """Every measured threshold of the engines."""

    # C++ on a CPU, any routing. "EM: native": training steps of idpa_cnn at batch 1, 2 and 4 on an AMD EPYC, command
    # not on record; without gradients the time of a compilation decides, not on record
    #: elements of the votes in training from which it pays
    native_min_votes: int = 1 << 18
    #: the same without gradients: the first use of a pose's shape on a machine compiles for two seconds
    native_min_votes_without_grad: int = 1 << 23

    # IDPA. "IDPA: blocked" (Intel Xeon, scripts not in the repository) has max_inner and block_votes; "IDPA: chunked"
    # (one thread of a machine not on record) the chunks, "IDPA: masked" (Intel Xeon) products with at most 10 parents
    # and with 100; blocked_min_votes is not on record
    #: elements of the votes of a layer from which it works in blocks; fewer fit the caches without blocks
    idpa_blocked_min_votes: int = 1 << 20
    #: columns of a child's pose up to which votes cost less to recompute in each iteration than to store
    idpa_blocked_max_inner: int = 16
    #: elements of the votes of a block, for each thread; two such buffers fill half of a 2 MiB cache
    idpa_block_votes: int = 1 << 17
    #: elements of the votes of an image in one chunk of an exported graph
    idpa_chunk_votes: int = 1 << 20
    #: parents of a fully connected layer up to which an exported graph masks products instead of gathering votes
    idpa_masked_max_parents: int = 16

    # Dynamic routing. "Dynamic routing: blocked" (Intel Xeon, scripts not in the repository) has block_votes: no gain
    # below 2^21. Not on record: blocked_min_votes and blocked_max_image_votes (only that blocks of one or two images
    # gained nothing), native_min_routings (the width of a vector), half_min_child_dim
    #: elements of the votes from which they are routed for some images at a time
    dynamic_blocked_min_votes: int = 1 << 20
    #: elements of the votes of an image up to which they are: blocks of few images read all weights for each block
    dynamic_blocked_max_image_votes: int = 1 << 19
    #: elements of the votes of a block (16 MiB in float32); smaller ones pay more for each call than they save. Layers
    #: with more weights than that store all votes in training
    dynamic_block_votes: int = 1 << 22
    #: images (or windows) from which the C++ code pays: a vector holds 16 of them in float32
    dynamic_native_min_routings: int = 16
    #: child pose dimension from which half-precision children form votes in half precision, although products of half
    #: precision first repack their inputs
    dynamic_half_min_child_dim: int = 16

    # Primary capsules. "Primary capsules: strided_conv": `python benchmarks/engines.py capsnet_dynamic
    # capsnet_dynamic_cifar --tuning NAME=VALUE --train --autocast` on an Intel Xeon with AMX; kernels below 9 were
    # not measured
    #: rows of a kernel from which the gradients of a strided convolution in bfloat16 are matrix products on a CPU
    strided_conv_min_kernel: int = 9
    #: images with 8x8 outputs whose products with the taps of one phase exist at one time (26 MB: 25 taps, 256
    #: channels); fewer images of larger outputs
    strided_conv_block_images: int = 32

    # EM routing. "EM: blocked" (one thread, scripts not in the repository) has blocked_min_votes and block_votes, and
    # times of capsnet6_em with the blocks of shared_block_elements, not of other sizes; "EM: chunked" has whole
    # models, the size of a chunk is not on record
    #: elements of the votes from which it works in blocks: below that, their small steps cost more than they save
    em_blocked_min_votes: int = 1 << 18
    #: elements of the votes of a block of windows (4 MiB in float32): each block takes a hundred small steps, and its
    #: votes, their squares and gradients should fit a cache
    em_block_votes: int = 1 << 20
    #: elements of the votes of an image in one chunk of an exported graph
    em_chunk_votes: int = 1 << 17
    #: elements in the largest temporary of a step in blocks (2 MiB in float32, the size of a core's own cache)
    em_shared_block_elements: int = 1 << 19

    # Self-routing. "Self-routing: vote_free" (Intel Xeon, two threads; command not on record) has block_elements:
    # 2^17 is slower, more gains nothing. vote_free_min_votes is not on record
    #: elements of the votes from which it forms none: below that, a product for each parent is too small
    self_routing_vote_free_min_votes: int = 1 << 20
    #: elements of the weighted children of one parent in a block of rows (1 MiB in float32)
    self_routing_block_elements: int = 1 << 18

    # capConv. "capConv: recompute" (AMD EPYC: `python benchmarks/engines.py encapnet_v1 --engine recompute --batch 8
    # 32 --train --memory --iters 7`) has block_elements and recompute_min_elements, "capConv: one convolution" (Intel
    # Xeon) has one_convolution_max_child_dim: encapnet_v1, and encapnet6_master, which is slower with it
    #: elements of the maps of one branch in a block of images (2 MiB in float32)
    capconv_block_elements: int = 1 << 19
    #: pose dimension of the children up to which one convolution costs less than a grouped and an ungrouped one
    capconv_one_convolution_max_child_dim: int = 4
    #: elements of the maps of all images from which blocks pay without gradients too
    capconv_recompute_min_elements: int = 1 << 18


#: The thresholds in force; :func:`tuned` changes them temporarily.
TUNING = Tuning()


@contextmanager
def tuned(**values: int) -> Iterator[None]:
    """Within this context, set thresholds of :data:`TUNING` to the given values: for tests and benchmarks."""
    changed, before = vars(replace(TUNING, **values)).copy(), vars(TUNING).copy()
    try:
        vars(TUNING).update(changed)
        yield
    finally:
        vars(TUNING).update(before)
