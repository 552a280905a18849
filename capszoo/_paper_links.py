"""Addresses and labels of papers, by the identifiers of the models' configurations (``arXiv:1710.09829``)."""

from __future__ import annotations

__all__ = ["PAPER_LINKS", "paper_address", "paper_label"]

#: Address of a paper by the kind of its identifier.
PAPER_LINKS = {
    "arXiv": "https://arxiv.org/abs/{}",
    "doi": "https://doi.org/{}",
    "neurips": "https://proceedings.neurips.cc/paper/{}-Abstract.html",
    "openreview": "https://openreview.net/forum?id={}",
}


def paper_address(paper_id: str) -> str:
    """The paper's address on the web; the identifier itself if its kind is unknown.

    >>> paper_address("arXiv:1710.09829")
    'https://arxiv.org/abs/1710.09829'
    """
    kind, _, identifier = paper_id.partition(":")
    return PAPER_LINKS[kind].format(identifier) if kind in PAPER_LINKS else paper_id


def paper_label(paper_id: str) -> str:
    """A short name for tables: venue and year of NeurIPS's papers, else the identifier.

    >>> paper_label("neurips:2019/hash/e46bc064f8e92ac2c404b9871b2a4ef2")
    'NeurIPS 2019'
    """
    kind, _, identifier = paper_id.partition(":")
    return f"NeurIPS {identifier.partition('/')[0]}" if kind == "neurips" else paper_id
