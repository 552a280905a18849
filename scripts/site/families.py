"""A page for each model family: description, layers and shapes, routing, variants, weights, speed, use, citation."""

from __future__ import annotations

import html
import importlib
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import capszoo
from benchmarks.models import markdown
from capszoo._pretrained.catalogue import checkpoints
from capszoo.errors import NoCapsules
from capszoo.models import MODULES
from capszoo.preprocess import model_input_size
from capszoo.recipes.release.model_card import paper_link
from capszoo.recipes.release.paper_results import counted, protocol_lines, seeds_note
from scripts.generate import first_line, stored
from scripts.pictures import caption, kinds_of
from scripts.site.reference import docstring


@dataclass(frozen=True)
class Family:
    """Parts of a page that cannot be derived from a model.

    Attributes:
        title: of the page.
        example: architecture whose layers are drawn.
        routing: the procedure, in the symbols of the reference code.
        code: function of ``capszoo.layers`` that implements the procedure; empty without routing.
        use: further lines of the example.
    """

    title: str
    example: str
    routing: str = ""
    code: str = ""
    use: str = ""


FAMILIES = {
    "capsnet_dynamic": Family(
        "Dynamic routing",
        "capsnet_dynamic",
        "b = 0\nrepeat:\n  c_ij = softmax_j(b_ij)\n  v_j  = squash(sum_i c_ij u_ij)\n  b_ij = b_ij + u_ij . v_j",
        "dynamic_routing",
    ),
    "capsnet_em": Family(
        "EM routing",
        "capsnet_em_norb_small",
        "M-step: mu_j, sigma_j^2 = mean and variance of the votes, weighted by r_ij a_i\n"
        "        a_j = sigmoid(lambda (beta_a - sum_h (beta_v + log sigma_jh) sum_i r_ij))\n"
        "E-step: r_ij = a_j N(v_ij; mu_j, sigma_j^2) / sum_k a_k N(v_ik; mu_k, sigma_k^2)",
        "em_routing",
    ),
    "idpa": Family(
        "Inverted dot-product attention routing",
        "idpa_resnet",
        "a_ij = v_ij . p_j\nr_ij = softmax_j(a_ij)\np_j  = LayerNorm(sum_i r_ij v_ij)",
        "idpa_routing",
    ),
    "routing_pool": Family(
        "Routing pooling",
        "resnet20_routingcaps",
        "c = softmax over positions of b\ns = sum over positions of c x\n"
        "b = b + lambda (x . v), with v the activation of s",
        "routing_pool",
    ),
    "encapnet": Family(
        "EncapNet",
        "encapnet6_master",
        "v_j = squash(alpha_j * master_j(u) + beta_j * aide_j(u))\n"
        "The master branch maps the capsule of the same place, the aide branch all capsules; nothing is iterated.",
        "capconv_combine",
    ),
    "efficient_capsnet": Family(
        "Efficient-CapsNet",
        "efficient_capsnet",
        "A_j = V_j V_j^T / sqrt(d)\nc_ij = softmax_j(sum_k A_kij) + bias_ij\ns_j = squash(sum_i c_ij v_ij)",
        "self_attention_routing",
    ),
    "deepcaps": Family(
        "DeepCaps",
        "deepcaps",
        "v_jp = squash(sum_i c_ijp u_ijp + bias_j), with c_ijp = softmax over j and p of b_ijp\n"
        "b_ijp = b_ijp + u_ijp . v_jp, for parent types j at positions p (the skip connection of the fourth block)",
        "dynamic_routing",
    ),
    "hvc": Family("HVC", "hvc"),
    "caps_head": Family(
        "Capsule heads",
        "resnet20_selfrouting",
        "self-routing: c_ij = softmax_j(W_i u_i), a_j = sum_i c_ij a_i / sum_i a_i\n"
        "heinsen: R_ij = softmax_j(log sigmoid(S(u_i, G(v_j)))), credit_ij = f(a_i) (use_ij R_ij - ign_ij (1 - R_ij)), "
        "v_j = sum_i credit_ij vote_ij\n"
        "The other heads route as on the pages of their families.",
        "self_routing",
        'net = capszoo.attach_head("resnet18", routing="self_routing", num_classes=37)  # on any timm backbone',
    ),
    "cnn_baselines": Family("Networks without capsules", "cnn_sabour"),
}


def models_of(module: str) -> list[str]:
    """The architectures of a model file."""
    from timm.models import model_entrypoint

    return [
        name for name in capszoo.list_models() if model_entrypoint(name).__module__.endswith(f".{module}")
    ]


def shapes(net: nn.Module) -> list[tuple[str, str, tuple[int, ...]]]:
    """Name, kind and output shape (without the batch) of the stages and of the modules of the head, as they run."""
    watched = {f"stages.{name}": m for name, m in net.stages.named_children()}  # type: ignore[union-attr, operator]
    watched |= {name: m for name, m in net.named_children() if name not in ("stages", "decoder")}
    if not watched:
        raise ValueError(f"{type(net).__name__} has no modules to draw")
    found: list[tuple[str, str, tuple[int, ...]]] = []
    hooks = []
    for name, module in watched.items():

        def note(module: nn.Module, _: Any, output: Any, name: str = name) -> None:
            first = output
            while isinstance(first, (tuple, list)) and first:
                first = first[0]
            if isinstance(first, torch.Tensor) and name not in [entry[0] for entry in found]:
                found.append((name, type(module).__name__, tuple(first.shape[1:])))

        hooks.append(module.register_forward_hook(note))
    channels, height, width = model_input_size(net)
    try:
        with torch.no_grad():
            scores = net.eval()(torch.zeros(1, channels, height, width))
    finally:
        for hook in hooks:
            hook.remove()
    start = ("input", "images", (channels, height, width))
    return [
        start,
        *found,
        *_routed(net, torch.zeros(1, channels, height, width)),
        ("scores", "classes", tuple(scores.shape[1:])),
    ]


def _routed(net: nn.Module, images: torch.Tensor) -> list[tuple[str, str, tuple[int, ...]]]:
    """Shapes of the couplings of each routing and of the class capsules; none for a network without them."""
    try:
        with torch.no_grad():
            output = net.forward_capsules(images)  # type: ignore[operator]
    except (NotImplementedError, NoCapsules):
        return []
    rows = [(f"routing {k}", "couplings", tuple(c.shape[1:])) for k, c in enumerate(output.couplings, 1)]
    return [*rows, ("class capsules", "poses", tuple(output.poses.shape[1:]))]


def diagram(rows: list[tuple[str, str, tuple[int, ...]]]) -> str:
    """Layers from top to bottom as an SVG drawing that is readable on light and dark pages."""
    width, step, tall = 560, 46, 32
    parts = []
    for i, (name, kind, shape) in enumerate(rows):
        y = 6 + i * step
        size = " x ".join(map(str, shape))
        parts.append(
            f'<rect x="10" y="{y}" width="{width - 20}" height="{tall}" rx="5" fill="#7a9cc6" fill-opacity=".18" '
            'stroke="#7a9cc6"/>'
            f'<text x="22" y="{y + 21}" font-weight="bold">{html.escape(name.removeprefix("stages."))}</text>'
            f'<text x="{width // 2}" y="{y + 21}" text-anchor="middle">{html.escape(kind)}</text>'
            f'<text x="{width - 22}" y="{y + 21}" text-anchor="end">{size}</text>'
        )
        if i:
            parts.append(f'<path d="M{width // 2} {y - step + tall} V{y}" stroke="#7a9cc6" fill="none"/>')
    height = 12 + len(rows) * step - (step - tall)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'font-family="sans-serif" font-size="13" fill="#5b7ea8">{"".join(parts)}</svg>\n'
    )


def family_pages(folder: Path) -> None:
    """Write an index, a page and a drawing for each family."""
    folder.mkdir(parents=True)
    assert set(FAMILIES) == set(MODULES), "every model file needs an entry in FAMILIES"
    lines = ["# Models", "", "| family | architectures | weights |", "|---|---:|---:|"]
    for module, family in FAMILIES.items():
        names = models_of(module)
        weights = sum(info.architecture in names for info in checkpoints(aliases=False).values())
        lines.append(f"| [{family.title}]({module}.md) | {len(names)} | {weights} |")
        page = _page(folder, module, family, names)
        (folder / f"{module}.md").write_text(page, encoding="utf-8")
    lines += ["", "[Every architecture and checkpoint in one table](../models.md).", ""]
    toc = ["```{toctree}", ":hidden:", "", *FAMILIES, "../models", "```", ""]
    (folder / "index.md").write_text("\n".join(lines + toc), encoding="utf-8")


def _page(folder: Path, module: str, family: Family, names: list[str]) -> str:
    file = importlib.import_module(f"capszoo.models.{module}")
    net = capszoo.create_model(family.example)
    (folder / f"{module}.svg").write_text(diagram(shapes(net)), encoding="utf-8")
    parts = [f"# {family.title}", docstring(file)]
    drawing = f"![Layers of {family.example} with the shapes of their outputs]({module}.svg)"
    shaped = (
        "A row for each module, with the shape of its output for one image; below them, what routing gives."
    )
    parts += ["## Layers", f"`{family.example}` at its default size. {shaped}", drawing]
    if family.routing:
        parts += ["## Routing", f"```text\n{family.routing}\n```"]
        function = getattr(capszoo.layers, family.code)
        source = inspect.getsource(function)
        parts += [f"The code, `{function.__module__}.{family.code}`:", f"```python\n{source}```"]
    rows = ["| model | parameters | input | what it is |", "|---|---:|---|---|"]
    papers: list[str] = []
    for name in names:
        info = capszoo.model_info(name)
        size = "×".join(map(str, info.input_size))
        rows.append(f"| `{name}` | {info.num_params:,} | {size} | {first_line(name).rstrip('.')} |")
        papers += [paper for paper in info.paper_ids if paper not in papers]
    parts += ["## Variants", "\n".join(rows), *_weights(names), *_speed(names)]
    parts += ["## Use", f"```python\n{example_code(family, names)}\n```"]
    cite = [
        "## Cite",
        "Cite capszoo by its `CITATION.cff`, and the papers: " + ", ".join(map(paper_link, papers)) + ".",
    ]
    return "\n\n".join(parts + (cite if papers else [])) + "\n"


def example_code(family: Family, names: list[str]) -> str:
    """Predict with the default weights of the family's example, or of another model that has some."""
    known = [info for info in checkpoints(aliases=False).values() if info.architecture in names]
    lines = ["import capszoo", ""]
    if known:
        one = min(
            known, key=lambda info: (info.architecture != family.example, not info.raw.get("canonical"))
        )
        image = "digit.png" if all(label.isdigit() for label in one.label_names or ("",)) else "photo.jpg"
        lines += [f'model = capszoo.load("{one.name}")', f'print(model.predict("{image}").label)']
    else:
        lines.append(f'net = capszoo.create_model("{family.example}")')
    return "\n".join([*lines, *filter(None, [family.use])])


def _speed(names: list[str]) -> list[str]:
    """Measured times, from the results of benchmarks/models.py and benchmarks/export.py."""
    measured, exported = stored("models.json"), stored("export.json")
    eager = {row["model"]: row for row in measured["rows"]}
    files = {row["model"]: row for row in exported["rows"]}
    rows, others = [], []
    figures = {
        "forward_ms": ".1f",
        "forward_ratio": ".2f",
        "train_ms": ".1f",
        "train_ratio": ".2f",
        "peak_mib": ".0f",
    }
    for name in names:
        cells = ["not measured", *[""] * 5]
        if at := eager.get(name):
            cells = [str(at["batch"]), *(format(at[key], digits) for key, digits in figures.items())]
        rows.append([f"`{name}`", *cells])
        cells = ["not measured", *[""] * 4]
        if row := files.get(name):
            cells = [f"{row['file_bytes'] / 1e6:.1f}"]
            for batch in ("1", "16"):
                at = row["times"].get(batch)
                cells += [f"{at['ms']:.1f}", f"{at['eager']:.2f}"] if at else ["not measured", ""]
        others.append([f"`{name}`", *cells])
    head = "model | batch | forward, ms | × ResNet-18 | training step, ms | × ResNet-18 | peak memory, MiB"
    heads = "model | file, MB | batch 1, ms | eager / ORT | batch 16, ms | eager / ORT"
    about = measured["settings"]
    places = {files[name]["processor"] for name in names if name in files} - {""} or {
        "a processor not stated"
    }
    return [
        "## Speed",
        "**GPU**: [training steps on an NVIDIA H200](../performance.md#on-a-gpu). The times below are of CPUs.",
        f"In PyTorch {about['torch']}, untrained, float32, on {about['processor']}; the ResNet-18 is the CIFAR one "
        "at 3x32x32 ([how it was measured](../benchmarks.md)).",
        "\n".join(markdown(head, rows)),
        f"Exported, in ONNX Runtime on {' or '.join(sorted(places))}. Above 1, the file is faster than eager PyTorch "
        "([how it was measured](../benchmarks.md#exported-files)).",
        "\n".join(markdown(heads, others)),
    ]


def _weights(names: list[str]) -> list[str]:
    known = {k: v for k, v in checkpoints(aliases=False).items() if v.architecture in names}
    if not known:
        return ["## Weights", "No weights are bundled yet; `capszoo train` makes them."]
    rows, parts = [], []
    for name, info in known.items():
        test = info.raw["metrics"]["test"]
        accuracy = f"{test['top1']:.2f}{seeds_note(info)}"
        rows.append([f"`{name}`", info.metadata.dataset.name, accuracy, f"{test['n']:,}", counted(info)])
        parts += [f"### {name}", "\n".join(protocol_lines(info))]
        if info.metadata.history:
            parts.append(f"![Training curves of {name}](../curves/{name}.svg)")
        for kind in kinds_of(info):
            parts.append(f"{caption(info, kind)}.\n\n![{kind} of {name}](../pictures/{name}.{kind}.png)")
    table = markdown("weights | data set | accuracy, % | n | counted", rows, (0, 1, 4))
    return ["## Weights", "\n".join(table), *parts]
