"""The model card of a checkpoint, shown on the Hub and written only from its metadata.

The YAML header (licence, tags, data set, model-index) is created and validated by huggingface_hub's classes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from timm.models import get_pretrained_cfg

from capszoo._pretrained.catalogue import PAPER_LINKS, checkpoints, paper_address, paper_label
from capszoo._pretrained.files import HUB_FILENAME, METADATA_FILENAME
from capszoo._pretrained.info import WeightsInfo, other_names
from capszoo.models._papers import PAPERS
from capszoo.scores import SCORE_KINDS

from ..evaluation.metrics import recall_line
from .paper_results import (
    began_with,
    counted,
    figures_table,
    paper_figures,
    protocol_lines,
    start_name,
    trained_further,
)
from .public import PRIVATE_SET, is_private_set, public

#: Names of further files of a repository, besides the weights, ``config.json`` and ``README.md``.
GOLDEN, LABELS = "golden.safetensors", "labels.txt"
CURVES, CONFUSION = "curves.png", "confusion.png"

#: Well-known copies of the data sets on the Hub.
HUB_DATASETS = {
    "mnist": "ylecun/mnist",
    "fashion_mnist": "zalando-datasets/fashion_mnist",
    "cifar10": "uoft-cs/cifar10",
    "cifar100": "uoft-cs/cifar100",
}

#: Maximum number of classes visible in a card's table; more are collapsed.
MOST_ROWS = 25

PICTURES = {CURVES: "Training curves", CONFUSION: "Confusion matrix"}


def paper_link(paper_id: str) -> str:
    """``"arXiv:1710.09829"`` as a markdown link."""
    return f"[{paper_label(paper_id)}]({paper_address(paper_id)})"


def paper_ids(info: WeightsInfo) -> list[str]:
    """Identifiers of the papers of an architecture of the zoo; none for timm's, which names its weights' papers."""
    cfg = get_pretrained_cfg(info.architecture) if info.architecture in PAPERS else None
    paper_ids = getattr(cfg, "paper_ids", None) or ()
    if info.architecture == "caps_head" and info.model_args.get("routing", "idpa") != "idpa":
        paper_ids = ()  # the configuration names the paper of its default routing
    ids = (paper_ids,) if isinstance(paper_ids, str) else tuple(paper_ids)
    return [paper_id for paper_id in ids if paper_id.partition(":")[0] in PAPER_LINKS]


def _dataset(info: WeightsInfo) -> tuple[str, str, str]:
    """Name, title and source of the training data."""
    dataset = info.metadata.dataset
    if is_private_set(dataset.name):
        return str(public(dataset.name)), PRIVATE_SET, ""
    name = dataset.name or "unknown"
    return name, dataset.title or name, dataset.source


def _results(info: WeightsInfo) -> list[EvalResult]:
    """Our results; the papers' are in the card's text, because tools take each result here for this repository's."""
    name, title, _ = _dataset(info)
    common: dict[str, Any] = dict(
        task_type="image-classification",
        task_name="Image Classification",
        dataset_type=_hub_dataset(name) or name,
        dataset_name=title,
        metric_type="accuracy",
    )
    results = []
    for split, result in info.metadata.metrics.items():
        if split != "validation" and result.top1 is not None:
            named = f"{counted(info)}, % (n = {result.n} images)"
            results.append(
                EvalResult(**common, metric_value=result.top1, metric_name=named, dataset_split=split)
            )
    return results


def _hub_dataset(name: str) -> str | None:
    """A data set's repository on the Hub: of a named set, or of ``hf:OWNER/NAME``, which may also be a folder."""
    repository = name.removeprefix("hf:")
    if repository != name and re.fullmatch(r"[\w.-]+/[\w.-]+", repository) and not Path(repository).is_dir():
        return repository
    return HUB_DATASETS.get(name)


def card_data(info: WeightsInfo) -> ModelCardData:
    """The card's header."""
    name, _, _ = _dataset(info)
    results, start = _results(info), began_with(info) or ""
    return ModelCardData(
        license=info.license,
        library_name="capszoo",
        pipeline_tag="image-classification",
        tags=["image-classification", "capsule-network", "capszoo", "pytorch", info.architecture],
        datasets=[dataset] if (dataset := _hub_dataset(name)) else None,
        base_model=start.removeprefix("hf-hub:").partition("@")[0] if start.startswith("hf-hub:") else None,
        metrics=["accuracy"],
        model_name=info.name if results else None,
        eval_results=results or None,
    )


def snippet(name: str) -> str:
    """Python code that loads the model by its name and classifies an image file with it."""
    return f"""import capszoo

model = capszoo.load("{name}")
for found in model.predict("picture.png", topk=3).top:  # an image file of yours
    print(found.label, f"{{found.probability:.4f}}")"""


def model_card(
    info: WeightsInfo,
    repo_id: str,
    private: bool = False,
    pictures: Sequence[str] = (),
    local: bool = False,
) -> ModelCard:
    """The card of a checkpoint under the name ``repo_id``.

    Args:
        info: metadata of the checkpoint.
        repo_id: ``user/repository``, or with ``local`` the name of the run's folder.
        private: whether other users need a token to read it.
        pictures: which of ``CURVES`` and ``CONFUSION`` exist beside the card.
        local: for the folder of a run, which is not on the Hub.
    """
    metadata = info.metadata
    # without ./ a folder that has the name of a model would stand for the zoo's weights
    known_as = f"./{repo_id}" if local else f"hf-hub:{repo_id}"
    _, title, source = _dataset(info)
    labels = info.label_names or ()
    papers = [paper_link(paper_id) for paper_id in paper_ids(info)]
    size = "×".join(map(str, info.input_size))
    from_paper = f" Paper: {', '.join(papers)}." if papers else ""
    about = public(metadata.description, "description") or f"{info.architecture} trained on {title}"
    start = start_name(info)
    trained = f"Fine-tuned from `{start}` on" if start and not trained_further(info) else "Trained on"
    shown = ", ".join(labels[:20]) + (
        f" and {len(labels) - 20} more (`{LABELS}`)" if len(labels) > 20 else ""
    )
    parts = [
        f"# {repo_id}",
        f"{about[0].upper()}{about[1:].rstrip('.')}: `{info.architecture}` of "
        f"[timm](https://github.com/huggingface/pytorch-image-models)'s registry once capszoo is imported, "
        f"{metadata.num_params or 0:,} parameters, for images of {size} (channels, height, width).{from_paper}",
        f"{trained} {title}"
        + (f" ({source})." if source not in ("", title) else ".")
        + (f" Classes: {shown}." if labels else ""),
        "## Use",
        "With capszoo installed (`pip install .` in its checkout)"
        + (", and after `hf auth login`, as the repository is private:" if private else "")
        + (", from the folder above this one:" if local else "" if private else ":"),
        f"```python\n{snippet(known_as)}\n```",
        "On the command line:"
        if local
        else f'`timm.create_model("{known_as}", pretrained=True)` works after `import capszoo`; on the command line:',
        f"```sh\ncapszoo predict {shlex.quote(known_as)} picture.png\n"
        f"capszoo export {shlex.quote(known_as)} --out bundle\n```",
        "" if local else _transformers(info, repo_id),
        _other_names(info),
        "## Results",
        f"Accuracy of the file in this {'folder' if local else 'repository'}, "
        "± the binomial standard error"
        + (
            ", and what the paper reports:"
            if paper_figures(info)
            else "; no paper reports a result for this network and data set."
        ),
        "\n".join(figures_table(info)),
        "\n".join(protocol_lines(info)),
        _classes(info),
        "## Training",
        *(f"![{alt}]({file})" for file, alt in PICTURES.items() if file in pictures),
        _recipe(public(info.raw.get("recipe"))),
        _provenance(info),
        "## Limits",
        _limits(info, title),
        "## Files",
        _files(info, local),
    ]
    return ModelCard(f"---\n{card_data(info).to_yaml()}\n---\n\n" + "\n\n".join(p for p in parts if p) + "\n")


def _transformers(info: WeightsInfo, repo_id: str) -> str:
    """Which of transformers' loaders fit a model."""
    call = f'`AutoModelForImageClassification.from_pretrained("{repo_id}")`'
    loads = f"In transformers, {call} loads it after `import capszoo`, and"
    if info.input_size[0] == 3 and info.score_kind == "logits":
        return f'{loads} so does `pipeline("image-classification", model="{repo_id}")`.'
    why = "applies a softmax, and the scores are no logits" if info.input_size[0] == 3 else "makes images RGB"
    return f"{loads} `pipeline` does not fit: it {why}. Use capszoo's `predict` on image files."


def _other_names(info: WeightsInfo) -> str:
    """The further names of a checkpoint of the zoo, for architectures with the same network."""
    stored = checkpoints(aliases=False).get(info.name)
    names = (
        other_names(checkpoints(aliases=False), info.name) if stored and stored.sha256 == info.sha256 else []
    )
    if not names:
        return ""
    return f"In the zoo, {' and '.join(f'`{name}`' for name in names)} load the same weights into the same network."


def _classes(info: WeightsInfo) -> str:
    """Table of the accuracy of each class, if the metadata have it (``finetune`` writes it)."""
    per_class = info.metadata.per_class
    if not per_class:
        return ""
    lines = [f"| class | images of {per_class.split} | recall, % |", "|---|---:|---:|"]
    for label, n, right in zip(info.label_names or (), per_class.images, per_class.right, strict=True):
        name = label.replace("|", "\\|")  # else it would end the cell
        lines.append(f"| {name} | {n:,} | {f'{100 * right / n:.1f}' if n else ''} |")
    table = "\n".join(lines)
    if len(lines) > MOST_ROWS + 2:
        table = f"<details><summary>By class</summary>\n\n{table}\n\n</details>"
    worst = recall_line(per_class.split, info.label_names or (), per_class.right, per_class.images)
    return f"{worst[0].upper()}{worst[1:]}.\n\n{table}" if worst else table


def _files(info: WeightsInfo, local: bool) -> str:
    weights, metadata, golden = (
        (f"{info.name}.safetensors", f"{info.name}.json", f"{info.name}.golden.npz")
        if local
        else (HUB_FILENAME, METADATA_FILENAME, GOLDEN)
    )
    config = "recipe.yaml`: every setting" if local else "config.json`: architecture, input, labels, for timm"
    return (
        f"- `{weights}`: the weights (sha256 `{info.sha256}`), which loading checks; there is no pickle\n"
        f"- `{metadata}`: recipe, seed, commit, data set fingerprint, metrics, history\n"
        f"- `{golden}`: a few images and the scores they must get\n"
        f"- `{config}; `{LABELS}`: the labels, one a line"
    )


def _recipe(recipe: dict[str, Any] | None) -> str:
    text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True).rstrip()
    return f"<details><summary>The recipe</summary>\n\n```yaml\n{text}\n```\n\n</details>" if recipe else ""


def _provenance(info: WeightsInfo) -> str:
    lines, metadata = [], info.metadata
    if metadata.commit:
        changed = " and changes that were not committed" if metadata.commit.endswith("+changes") else ""
        lines.append(f"- Code: commit `{metadata.commit.removesuffix('+changes')}`{changed}")
    versions = ", ".join(f"{key} {value}" for key, value in metadata.versions.items())
    if versions:
        lines.append(f"- Versions: {versions}")
    for split, digest in metadata.dataset.sha256.items():
        lines.append(f"- Fingerprint of the {split} images and labels: `{digest}`")
    return "\n".join(lines)


def _score_words(info: WeightsInfo) -> str:
    """The kind of the scores, and how probabilities are computed from them."""
    kind = info.score_kind
    if kind not in SCORE_KINDS:
        return "logits, capsule lengths or activations. Probabilities are computed from them"
    name = {"lengths": "capsule lengths"}.get(kind.removeprefix("label_"), kind.removeprefix("label_"))
    return f"{name.replace('_', ' ')}. Probabilities: {SCORE_KINDS[kind]}"


def _limits(info: WeightsInfo, title: str) -> str:
    height, width = info.raw.get("object_size") or info.input_size[1:]
    whole = info.input_size[1:]
    padded = "" if (height, width) == tuple(whole) else f" and padded to {whole[0]}×{whole[1]}"
    lines = [
        f"- It knows only the {info.num_classes} classes of {title}: images of anything else are assigned to them too.",
        f"- Images are scaled to {height}×{width} pixels{padded}: what looks alike at that size, it cannot tell apart.",
        f"- Scores: {_score_words(info)}. They are not calibrated.",
        "- This card states no robustness (to noise, shifts, other cameras). Fairness has not been measured.",
    ]
    if "test" not in info.metadata.metrics:
        lines.append("- No test set was available: its accuracy is unknown.")
    return "\n".join(lines)
