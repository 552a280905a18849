"""EM routing in windows, written for graphs that run on a CPU: see :func:`chunked_routing`.

A graph has no loop over blocks of windows, unlike the blocked engine. Instead it has an unrolled loop over the output
positions, a few at a time: every tensor with the size of votes is formed and consumed for these only, and stays in the
cache at the batch sizes used on a CPU. With ONNX Runtime at batch 16, chunks of twice the size took 1.5 times as long.
Letters as in :mod:`capszoo.layers.em`; m pairs of entries of a row.
"""

from typing import List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from ..tuning import TUNING
from .steps import MIN_SHARE, VAR_SHARE, Settings, first_weights, log_weight, parent_logits


def chunked_routing(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    flat_weight: Tensor,
    beta_v: Tensor,
    beta_a: Tensor,
    settings: Settings,
    need_couplings: bool,
) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
    """:func:`.routing.window_routing` of the windows of a batch of images.

    The first iteration forms no votes: with even couplings their moments are linear and quadratic in the rows of the
    children's poses, and two wide products give them. That variance is a difference of moments about 0. Its relative
    error is the rounding of the dtype, times the squared ratio of the votes' mean to their deviation. The moments of
    later iterations are taken about the first mean.

    Args:
        poses: ``[b, s, i, d]`` at s output positions, a plain integer.
        activations: ``[b, s, i]``.
        weight, flat_weight: the transforms, ``[i, q, j, r]`` and ``[i, d, j * e]``.
        beta_v, beta_a: ``[j]``.
        settings: see :func:`.routing.em_routing`.
        need_couplings: whether to return the couplings.

    Returns:
        poses ``[bs, j, e]``, logits ``[bs, j]``, and couplings ``[bs, j, i]`` or None.
    """
    num_iters, lam_start, lam_step, var_floor, eps, normalize = settings
    parents, pose_dim = beta_v.shape[0], flat_weight.shape[2] // beta_v.shape[0]
    cut = _Chunks(poses.shape[1], max(1, TUNING.em_chunk_votes // (poses.shape[2] * parents * pose_dim)))
    even, mass = first_weights(activations.flatten(0, 1), parents, eps)  # [bs, i], [bs, 1]
    mean, second = _even_moments(poses.flatten(0, 1), even, weight)
    variance = (second - mean * mean).clamp_min(var_floor)  # [bs, j, e]
    least = (VAR_SHARE * variance).clamp_min(var_floor)
    logits, log_sigma = parent_logits(mass, variance, beta_v, beta_a, lam_start, normalize, 0.0)
    shift = torch.zeros_like(mean)
    coupling: Optional[Tensor] = None
    votes, squares = _votes_about(cut, poses, flat_weight, mean) if num_iters > 1 else ([], [])
    for t in range(1, num_iters):
        # the E-step's terms of a child: sum_h p_h (V - mu)_h^2 with p = 1 / 2 sigma^2, expanded about the first mean
        precision = 0.5 / variance
        pull = 2.0 * precision * shift  # 0 in the first iteration
        level = log_weight(logits, log_sigma) - (0.5 * pull * shift).sum(dim=2)  # [bs, j]
        sums, couplings = [], []
        per_window = (activations.flatten(0, 1), precision, pull, level)
        for v, sq, a, p, d, high in zip(votes, squares, *map(cut.split, per_window), strict=True):
            distance = torch.matmul(sq, p.reshape(-1, pose_dim, 1))  # [nj, i, 1]
            if t > 1:
                distance = distance - torch.matmul(v, d.reshape(-1, pose_dim, 1))
            c = torch.softmax(high.unsqueeze(2) - distance.reshape(*high.shape, -1), dim=1)  # [n, j, i]
            sums.append(_moments(c * a.unsqueeze(1) + eps / parents, v, sq))
            couplings.append(c)
        mass, shift, second = cut.join(sums).split([1, pose_dim, pose_dim], dim=2)
        variance = torch.maximum(second - shift * shift, least)
        if need_couplings and t == num_iters - 1:
            coupling = cut.join(couplings)
        lam = lam_start + lam_step * t
        logits, log_sigma = parent_logits(
            mass.squeeze(2), variance, beta_v, beta_a, lam, normalize, MIN_SHARE
        )
    if need_couplings and coupling is None:
        coupling = torch.full_like(even, 1.0).unsqueeze(1).expand(-1, parents, -1) / parents
    return mean + shift, logits, coupling


class _Chunks(NamedTuple):
    """How windows are cut: into chunks of ``size`` out of the ``positions`` of every image."""

    positions: int
    size: int

    def split(self, x: Tensor) -> List[Tensor]:
        """Cut ``[bs, ...]`` into chunks ``[n, ...]``."""
        parts = x.unflatten(0, [-1, self.positions]).split(self.size, dim=1)
        return [part.flatten(0, 1) for part in parts]

    def join(self, chunks: List[Tensor]) -> Tensor:
        """Reassemble what :meth:`split` has cut."""
        sizes = [min(self.size, self.positions - k) for k in range(0, self.positions, self.size)]
        parts = [c.unflatten(0, [-1, size]) for c, size in zip(chunks, sizes, strict=True)]
        return torch.cat(parts, dim=1).flatten(0, 1)


def _votes_about(
    cut: _Chunks, poses: Tensor, flat_weight: Tensor, mean: Tensor
) -> Tuple[List[Tensor], List[Tensor]]:
    """Votes about ``mean`` ``[bs, j, e]`` and their squares, ``[nj, i, e]`` of each chunk."""
    votes, squares = [], []
    for x, m in zip(cut.split(poses.flatten(0, 1)), cut.split(mean), strict=True):
        v = torch.bmm(x.transpose(0, 1), flat_weight) - m.flatten(1)  # [i, n, j*e]
        # only products with these two follow, and they read this layout: no vote is copied
        votes.append(v.reshape(flat_weight.shape[0], -1, mean.shape[2]).transpose(0, 1))
        squares.append((v * v).reshape(flat_weight.shape[0], -1, mean.shape[2]).transpose(0, 1))
    return votes, squares


def _moments(weights: Tensor, votes: Tensor, squares: Tensor) -> Tensor:
    """Mass, mean and mean square with weights ``[n, j, i]``, as one tensor ``[n, j, 1 + 2e]``.

    One result per chunk, so that a runtime that schedules backwards from the results finishes a chunk before the next.
    """
    parents, children = weights.shape[1], weights.shape[2]
    total = weights.sum(dim=2, keepdim=True)  # [n, j, 1]
    share = (weights / total).reshape(-1, 1, children)
    moments = [total.reshape(-1, 1, 1), torch.matmul(share, votes), torch.matmul(share, squares)]
    return torch.cat(moments, dim=2).reshape(-1, parents, 2 * votes.shape[2] + 1)


def _even_moments(poses: Tensor, even: Tensor, weight: Tensor) -> Tuple[Tensor, Tensor]:
    """First and second moments of the votes about 0, ``[n, j, e]``.

    Args:
        poses: ``[n, i, d]``.
        even: ``[n, i]``, with sum 1.
        weight: ``[i, q, j, r]``.
    """
    size = weight.shape[1]
    x = poses.unflatten(2, [-1, size]).permute(3, 0, 2, 1)  # [q, n, p, i]
    weighted = x * even.unsqueeze(1)
    w = weight.transpose(0, 1).flatten(2)  # [q, i, j*r]
    pairs, products = [], []
    for k in range(size):
        pairs.append(weighted[k : k + 1] * x[k:])
        products.append(w[k : k + 1] * w[k : k + 1])
        if k + 1 < size:
            products.append(2.0 * w[k : k + 1] * w[k + 1 :])
    first = _summed(weighted, w, size)
    return first, _summed(torch.cat(pairs), torch.cat(products), size)


def _summed(features: Tensor, weights: Tensor, size: int) -> Tensor:
    """Features ``[m, n, p, i]`` and weights ``[m, i, j*r]`` to ``[n, j, e]``."""
    x = features.permute(1, 2, 0, 3).flatten(2)  # [n, p, m*i]
    sums = torch.matmul(x, weights.flatten(0, 1))  # [n, p, j*r]
    return sums.unflatten(2, [-1, size]).transpose(1, 2).flatten(2)
