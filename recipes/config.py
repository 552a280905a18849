"""Recipe models: a YAML file is validated by these models, and every unknown key or wrong value is one clear line.

A file may contain ``profiles: {short: {epochs: 20, ...}}``: other settings for the same model and tag, selected by name
(``--profile short``) and merged into the file's settings key by key; ``null`` resets a key to its default.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from capszoo._pretrained.checks import check_model_args
from capszoo.data.errors import DataError
from capszoo.data.specs import check_channels, check_name
from capszoo.errors import UsageError, WeightsError, unknown_name

from .yaml_tree import YamlError, read_yaml

if TYPE_CHECKING:
    from capszoo.data.augment import Augment


#: Keys of a recipe that suit the processor and may differ between the sessions of a run: the updates stay the same up
#: to rounding. ``sessions.json`` states them.
MACHINE_KEYS = frozenset({"channels_last", "compile", "precision"})

#: Keys of a recipe that change no update: they may differ between a run's sessions, and between runs of one recipe.
NEUTRAL_KEYS = frozenset({"description", "checkpoint_every", "eval_batch_size", "routing_images"})

#: Keys of a recipe that ``finetune`` derives from the number of images and from other keys.
DERIVED_KEYS = frozenset({"batch_size", "data.val_size", "early_stop", "schedule.warmup_epochs"})

CONFIGS = Path(__file__).resolve().parent / "configs"
#: What a profile cannot change: it trains the same model on the same data.
FIXED = ("arch", "tag", "profile", "profiles", "data.name")

#: Arguments of a model that are determined by the data, not by ``model_args``.
DATA_ARGS = ("num_classes", "in_chans", "img_size", "pretrained")

#: The schedules that each key of ``schedule`` has an effect on.
SCHEDULE_KEYS = {
    "milestones": ("multistep",),
    "decay_epochs": ("step",),
    "decay_rate": ("step", "multistep", "poly"),
    "min_lr": ("cosine", "tanh", "poly", "step"),
    "warmup_epochs": ("cosine", "tanh", "step", "multistep", "poly"),
    "warmup_lr": ("cosine", "tanh", "step", "multistep", "poly"),
}

#: Begins ``init.weights`` where they are those of a timm backbone.
BACKBONE = "backbone:"


def _no_flag(value: Any) -> Any:
    """Refuse ``true`` for a number: Python treats it as 1."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


Positive = Annotated[int, BeforeValidator(_no_flag), Field(gt=0, lt=2**31)]
NonNegative = Annotated[int, BeforeValidator(_no_flag), Field(ge=0, lt=2**31)]
Seed = Annotated[int, BeforeValidator(_no_flag), Field(ge=-(2**63), lt=2**63)]
# Accelerate's `set_seed` seeds NumPy, which takes 32 bits.
RunSeed = Annotated[int, BeforeValidator(_no_flag), Field(ge=0, lt=2**32)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeRate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


def _sides(value: Any) -> Any:
    """``32``, ``[32, 64]`` or ``32x64``: the side of a square, or rows and columns."""
    parts = value.lower().split("x") if isinstance(value, str) else value
    parts = list(parts) if isinstance(parts, (list, tuple)) else [parts]
    try:
        sides = tuple(int(part) for part in parts if not isinstance(part, (bool, float)))
    except (TypeError, ValueError):
        sides = ()
    if len(sides) != len(parts) or len(sides) not in (1, 2) or not all(0 < side < 2**31 for side in sides):
        raise ValueError("must be a side in pixels such as 32, or rows and columns such as 32x64")
    return sides[0] if len(set(sides)) == 1 else sides


Sides = Annotated[int | tuple[int, int], BeforeValidator(_sides)]


class RecipeError(UsageError):
    """A recipe is missing or invalid; the message is one line that names the key and the remedy."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class AugmentConfig(_Section):
    """Per-sample augmentation of the training images, on the device; see ``capszoo.data.Augment``."""

    #: Largest shift in pixels, filled with black; the same as padding by it and cropping at random.
    shift: NonNegative = 0
    #: Mirror half of the images; alternating: those that are mirrored in one epoch are not in the next.
    flip: bool | Literal["alternating"] = False
    #: What a shift brings in: black, or the image reflected at its edge.
    pad_mode: Literal["constant", "reflect"] = "constant"
    #: Side in pixels of a square at a random place that is set to the data set's mean.
    cutout: NonNegative = 0
    #: Last epochs of the run, which are without cutout.
    cutout_off_epochs: NonNegative = 0
    #: Side, or ROWSxCOLUMNS, to which all images are resized; the model sees a random patch of them (the middle in
    #: evaluation).
    resize: Sides | None = None
    #: Largest angle in degrees, either way.
    rotation: Annotated[float, Field(ge=0, le=180)] = 0.0
    #: Largest shear, either way, as the tangent of its angle.
    shear: Annotated[float, Field(ge=0, le=2)] = 0.0
    #: Smallest and largest factor of the size.
    scale: tuple[Rate, Rate] = (1.0, 1.0)
    #: Largest relative change, as those of contrast and saturation.
    brightness: Share = 0.0
    contrast: Share = 0.0
    saturation: Share = 0.0
    #: Largest change, as a share of the colour circle.
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    #: Rotate half of the images; the angle in degrees is this times a clipped normal number (deviation 0.33).
    tilt: Annotated[float, Field(ge=0, le=180)] = 0.0
    #: Largest share by which the width shrinks.
    squeeze: Annotated[float, Field(ge=0, lt=1)] = 0.0
    #: Shift within the black margin, so that nothing is cut off.
    shift_in_margin: bool = False
    #: Side of a square that becomes black.
    erase: NonNegative = 0

    @field_validator("scale")
    @classmethod
    def _ordered(cls, scale: tuple[float, float]) -> tuple[float, float]:
        if scale[0] > scale[1]:
            raise ValueError("the smallest factor comes first")
        return scale

    def build(self) -> Augment:
        from capszoo.data.augment import Augment  # imports torch, which reading a recipe does not need

        return Augment(**self.model_dump(exclude={"cutout_off_epochs"}))


class DataConfig(_Section):
    """The data set, its validation images, and how images are read."""

    #: A name that ``capszoo.data.DATASETS`` knows, or imagefolder:PATH, csv:FILE, wds:PATH, parquet:PATH, idx:PATH,
    #: hf:OWNER/NAME.
    name: str
    #: Side, or ROWSxCOLUMNS, of the images that the model sees; the data set's where it is left out.
    size: Sides | None = None
    #: Read images of files in grey (1) or in colour (3); where it is left out, in colour if any image has some.
    channels: Literal[1, 3] | None = None
    #: How images of another shape are framed, in timm's words: their middle is cropped, their sides are scaled
    #: separately, or they are shrunk and padded with the mean.
    crop_mode: Literal["center", "squash", "border"] = "center"
    #: Black and white of images with more than 8 bits a channel; where it is left out, one range for the set, from its
    #: training images.
    value_range: tuple[float, float] | None = None
    #: Images carved out of the training set for validation; nothing is selected on the test set.
    val_size: NonNegative = 5000
    val_seed: Seed = 0
    #: Train on N images only (after the validation split), for trials: the first ones of a named data set, random ones
    #: of a folder.
    limit: Positive | None = None
    augment: AugmentConfig = AugmentConfig()
    #: Where validation images come from: val_size of the training set; of each class its share of those; or the data
    #: set's own validation split.
    validation: Literal["carved", "stratified", "own"] = "carved"
    #: Measure on the test split at the end; false where the data set has none.
    test: bool = True
    #: Show each class equally often in training, however many images it has.
    balance: bool = False
    #: Leave images that cannot be read out, and say which; otherwise they are an error.
    skip_bad: bool = False
    #: Mean per channel of images in 0..1, to normalise them; the data set's where it is left out.
    mean: tuple[float, ...] | None = None
    std: tuple[Rate, ...] | None = None

    @field_validator("value_range")
    @classmethod
    def _ascends(cls, value_range: tuple[float, float] | None) -> tuple[float, float] | None:
        if value_range and not -float("inf") < value_range[0] < value_range[1] < float("inf"):
            raise ValueError("black comes first, such as [0, 4095]")
        return value_range

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        try:
            return check_name(name)
        except DataError as error:
            raise ValueError(str(error)) from error

    @model_validator(mode="after")
    def _channels_of_files(self) -> DataConfig:
        try:
            check_channels(self.name, self.channels)
        except DataError as error:
            raise ValueError(str(error)) from error
        return self


class StageConfig(_Section):
    """A number of first epochs of a run, on images of another size."""

    #: Side of the images in pixels.
    size: Positive
    epochs: Positive
    #: Side of the cutout square at this size; data.augment.cutout where it is left out.
    cutout: NonNegative | None = None


class OptimizerConfig(_Section):
    """An optimiser of timm's factory (which has torch's too); biases and norms have no weight decay.

    Timm's ``sgd`` has Nesterov momentum, ``momentum`` is SGD with the plain one.
    """

    name: str = "adamw"
    lr: Rate = 1e-3
    weight_decay: NonNegativeRate = 0.0
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    #: Factor of the learning rate from each layer to the one before it; the head has the full rate.
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    options: dict[str, Any] = {}


class ScheduleConfig(_Section):
    """A scheduler of timm's factory, stepped after every update."""

    name: Literal["cosine", "tanh", "step", "multistep", "poly", "none"] = "cosine"
    warmup_epochs: NonNegativeRate = 0.0
    warmup_lr: NonNegativeRate = 1e-6
    #: Least rate of "cosine", "tanh", "poly" and "step".
    min_lr: NonNegativeRate = 0.0
    #: Epochs of the drops of "multistep".
    milestones: tuple[NonNegativeRate, ...] = ()
    #: Epochs between the drops of "step".
    decay_epochs: Rate | None = None
    #: Factor of the drops of "step" and "multistep"; power of "poly" (1: a straight line to min_lr).
    decay_rate: Annotated[float, Field(gt=0, le=1)] = 0.1

    @field_validator("milestones")
    @classmethod
    def _ascend(cls, milestones: tuple[float, ...]) -> tuple[float, ...]:
        if list(milestones) != sorted(set(milestones)):
            raise ValueError(f"milestones must ascend, not {', '.join(f'{epoch:g}' for epoch in milestones)}")
        return milestones

    @model_validator(mode="after")
    def _has_drops(self) -> ScheduleConfig:
        if self.name == "multistep" and not self.milestones:
            raise ValueError("multistep needs milestones, the epochs of its drops: set schedule.milestones")
        if self.name == "step" and self.decay_epochs is None:
            raise ValueError("step needs the epochs between its drops: set schedule.decay_epochs")
        return self


class LossConfig(_Section):
    """A loss of ``capszoo.losses``, and its arguments."""

    name: str = "cross_entropy"
    options: dict[str, Any] = {}
    #: Weight of the decoder's summed squared error (the papers': 0.0005); needs ``model_args: {decoder: true}``.
    reconstruction: NonNegativeRate = 0.0

    @field_validator("name")
    @classmethod
    def _compares_scores(cls, name: str) -> str:
        if name == "reconstruction":
            raise ValueError("it is added to a loss of the scores: set loss.reconstruction to its weight")
        return name


class FeedbackConfig(_Section):
    """Feedback agreement (``capszoo.FeedbackAgreement``) between levels of the net; removed after training."""

    #: (lower, higher) modules by name, of any net; "encapnet": the pairs that the model itself names.
    pairs: Literal["encapnet"] | tuple[tuple[str, str], ...] = "encapnet"
    #: Units a module, where the model names the pairs.
    units: Literal[1, 2] = 2
    #: Factor of the sum of all units.
    weight: NonNegativeRate = 10.0
    #: Further arguments: generator, critic, metric, num_iters, epsilon, cost, bias_fix, backprop_plan, layout, …
    options: dict[str, Any] = {}


class InitConfig(_Section):
    """Initial weights; without this section they are random."""

    #: What ``capszoo predict`` takes: name.tag, hf-hub:USER/NAME, the folder of a run, or a .safetensors file. Or
    #: ``backbone:NAME``, for the backbone of ``caps_head`` alone: a timm name, hf-hub:USER/NAME or local-dir:folder.
    weights: str
    #: Fresh class capsules; false where the classes are those of the weights.
    new_classes: bool = True
    #: What stays as it is: "body" (the feature stages), "all" (all but the class capsules), or modules by name.
    freeze: tuple[str, ...] = ()


class Recipe(_Section):
    """A recipe, which gives one checkpoint with one tag."""

    arch: str
    tag: str
    description: str = ""
    #: The profile that was chosen; none: the file's own settings.
    profile: str | None = None
    model_args: dict[str, Any] = {}
    data: DataConfig
    epochs: Positive
    #: Sizes of the images in the first epochs, in order; the epochs left, at least 30%, are at data.size.
    stages: tuple[StageConfig, ...] = ()
    #: Images per update, over all processes and accumulated parts together.
    batch_size: Positive = 128
    #: Parts in which a process works through its share of a batch.
    accumulate: Positive = 1
    seed: RunSeed = 0
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    loss: LossConfig = LossConfig()
    feedback: FeedbackConfig | None = None
    init: InitConfig | None = None
    #: Largest norm of the gradient.
    clip_grad: Rate | None = None
    #: Stop after N epochs without a better validation accuracy; the best epoch's weights are kept.
    early_stop: Positive | None = None
    #: Largest decay of a moving average of the weights, which is evaluated and exported: at update t of a stage, from
    #: 2, the decay is 1 - (t - 1)^(-2/3), at most this value.
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    channels_last: bool = True
    #: Train through torch.compile; "reduce-overhead" also records CUDA graphs, for small networks on a GPU.
    compile: bool | Literal["reduce-overhead"] = False
    #: Images of a forward pass of validation and of the test at the end; chosen by the memory where it is left out.
    eval_batch_size: Positive | None = None
    #: Updates between checkpoints, beside those at the ends of epochs.
    checkpoint_every: Positive | None = None
    #: Validation images whose routing is measured after each epoch, into metrics.jsonl; ``capszoo curves`` draws it.
    routing_images: NonNegative = 0

    @field_validator("tag")
    @classmethod
    def _begins_with_data_set(cls, tag: str, info: Any) -> str:
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", tag):  # it becomes part of file names
            raise ValueError(
                "a tag is a short name of letters, digits, '_' and '-', without '.' or '/', beginning with its data set"
            )
        return tag

    @field_validator("model_args")
    @classmethod
    def _states_no_source(cls, args: dict[str, Any]) -> dict[str, Any]:
        """Weights with such arguments could not be loaded, so refuse them before training, not after."""
        decided = next((key for key in DATA_ARGS if key in args), None)
        if decided:
            raise ValueError(
                f"the recipe names '{decided}', which its data decide: leave it out (data.size sets the images' size)"
            )
        try:
            check_model_args(args, "the recipe")
        except WeightsError as error:
            raise ValueError(str(error)) from error
        return args

    @model_validator(mode="after")
    def _settings_go_together(self) -> Recipe:
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"batch_size {self.batch_size} cannot be divided into {self.accumulate} equal parts (accumulate)"
            )
        if self.accumulate > 1 and self.compile == "reduce-overhead":
            raise ValueError(
                "compile: reduce-overhead does not go with accumulate: the next part's CUDA graph overwrites the "
                "gradients of the one before; use compile: true"
            )
        if self.schedule.min_lr > self.optimizer.lr:
            raise ValueError(
                f"schedule.min_lr {self.schedule.min_lr:g} is above optimizer.lr {self.optimizer.lr:g}: lower it"
            )
        if not self.stages:
            return self
        if isinstance(self.data.size, tuple):
            raise ValueError("stages are of square images, and data.size is not square: leave stages out")
        full = self.epochs - sum(stage.epochs for stage in self.stages)
        if full < 0.3 * self.epochs:
            raise ValueError(
                f"stages leave {max(full, 0)} of {self.epochs} epochs at the full size: leave at least 30%"
            )
        if self.early_stop:
            raise ValueError(
                "stages and early_stop do not go together: accuracies at two sizes do not compare"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _without_former_keys(cls, tree: Any) -> Any:
        """Runs of earlier versions record keys that are gone; at the values that changed nothing they are dropped."""
        if not isinstance(tree, dict):
            return tree
        if tree.get("parallel") == "ddp":
            tree = {key: value for key, value in tree.items() if key != "parallel"}
        data = tree.get("data")
        augment = data.get("augment") if isinstance(data, dict) else None
        if isinstance(augment, dict) and not (augment.get("mixup") or augment.get("cutmix")):
            mixing = ("mixup", "cutmix", "mix_prob", "mix_off_epochs")
            kept = {key: value for key, value in augment.items() if key not in mixing}
            tree = {**tree, "data": {**data, "augment": kept}}
        return tree

    @property
    def name(self) -> str:
        return f"{self.arch}.{self.tag}"


def _section_at(location: tuple[Any, ...]) -> type[BaseModel]:
    section: type[BaseModel] = Recipe
    for key in location:
        annotation = section.model_fields[str(key)].annotation if str(key) in section.model_fields else None
        kinds = (annotation, *get_args(annotation))  # a section, or an optional section
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not inner:
            break
        section = inner[0]
    return section


def _one_line(error: ValidationError, where: str) -> str:
    first = error.errors(include_url=False)[0]
    location = first["loc"]
    key, section = (".".join(map(str, place)) for place in (location, location[:-1]))
    fields = _section_at(location[:-1]).model_fields
    if first["type"] == "extra_forbidden":
        kind = f"key of '{section}'" if section else "key"
        return f"{where}: {unknown_name(kind, str(location[-1]), fields)}"
    if first["type"] == "missing":
        return f"{where}: the key '{key}' is missing"
    message = first["msg"].removeprefix("Value error, ")
    # a place ends with a kind of value where a key takes several
    if location and isinstance(location[-1], str) and location[-1] not in fields:
        key = section
        kinds = [other["msg"] for other in error.errors() if other["loc"][:-1] == location[:-1]]
        message = " or ".join(dict.fromkeys(kinds))
    if not key:  # a combination of keys is invalid; the message names them
        return f"{where}: {message}"
    if isinstance(first["input"], str | int | float | bool | None):
        return f"{where}: '{key}: {first['input']}' is wrong: {message}"
    return f"{where}: '{key}' is wrong: {message}"


def list_recipes() -> list[str]:
    """Names of the recipes in the package, ``<arch>.<tag>``."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def find_recipe(name: str | Path) -> Path:
    """File of a recipe: a path to a YAML file, or the name of a recipe in the package."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml", ".json"):  # JSON is YAML
        if path.is_file():
            return path
        if path.parent == Path(".") and (CONFIGS / path.name).is_file():
            return CONFIGS / path.name
        raise RecipeError(f"no such recipe file: {path}")
    if (CONFIGS / f"{name}.yaml").is_file():
        return CONFIGS / f"{name}.yaml"
    raise RecipeError(unknown_name("recipe", str(name), list_recipes()))


def _apply(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise RecipeError(f"--set takes key=value, e.g. optimizer.lr=0.001; got '{override}'")
    if key in ("profile", "profiles"):
        raise RecipeError(f"--set {override}: a profile is chosen by --profile NAME")
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        if node.get(parent) is None:  # also where a run's file states null
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            raise RecipeError(f"--set {override}: '{parent}' has no keys of its own")
    try:
        node[last] = read_yaml(text)
    except YamlError as error:
        raise RecipeError(f"--set {key}: '{text[:100]}' is not a YAML value ({error})") from error


def _merged(tree: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Merge ``over`` into ``tree``: mappings key by key, all else replaced; keys set to null are removed."""
    result = dict(tree)
    for key, value in over.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            below = result.get(key)
            result[key] = _merged(below if isinstance(below, dict) else {}, value)
        else:
            result[key] = value
    return result


def _validate(tree: dict[str, Any], where: str) -> Recipe:
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise RecipeError(_one_line(error, where)) from error


def _profiles(tree: dict[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """Remove the profiles from a recipe file's tree, merge each into the file's settings, and validate them all."""
    profiles = tree.pop("profiles", None)
    if profiles is None:
        return {}
    if not isinstance(profiles, dict) or not all(isinstance(over, dict) for over in profiles.values()):
        raise RecipeError(f"{where}: 'profiles' must be names with settings, e.g. {{short: {{epochs: 20}}}}")
    merged = {}
    for name, over in profiles.items():
        for key in FIXED:
            first, _, second = key.partition(".")
            below = over.get(first)
            if first in over and (not second or (isinstance(below, dict) and second in below)):
                raise RecipeError(f"{where}, profile {name}: '{key}' is the recipe's, no profile changes it")
        merged[str(name)] = {**_merged(tree, over), "profile": str(name)}
        _validate(merged[str(name)], f"{where}, profile {name}")
    return merged


def recipe_text(path: Path) -> str:
    """A recipe file as text.

    Raises:
        RecipeError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{path} cannot be read ({error.strerror}): check its permissions") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not UTF-8 text: save it as UTF-8") from error


def _read(recipe: str | Path) -> tuple[dict[str, Any], str]:
    """A recipe file's tree and its name."""
    path = find_recipe(recipe)
    try:
        tree = read_yaml(recipe_text(path))
    except YamlError as error:
        raise RecipeError(f"{path}, {error}") from error
    if not isinstance(tree, dict):
        raise RecipeError(f"{path} is no recipe: it must be a mapping of keys to values")
    return tree, path.name


def list_profiles(recipe: str | Path) -> list[str]:
    """Names of a recipe's profiles."""
    tree, where = _read(recipe)
    return sorted(_profiles(tree, where))


def load_recipe(
    recipe: str | Path | Recipe | dict[str, Any],
    overrides: Sequence[str] | None = None,
    profile: str | None = None,
) -> Recipe:
    """Read and check a recipe.

    Args:
        recipe: path, name of a recipe of the package, a ``Recipe``, or a recipe's tree.
        overrides: ``key=value`` lines with dotted keys; values are YAML. They override the profile.
        profile: name of one of the recipe's profiles; None uses the recipe's settings.

    Raises:
        RecipeError: one line that names the key and the nearest valid one.
    """
    profiles: dict[str, dict[str, Any]] = {}
    if isinstance(recipe, Recipe):
        where, tree = recipe.name, recipe.model_dump()
    elif isinstance(recipe, dict):
        where, tree = f"{recipe['arch']}.{recipe['tag']}", copy.deepcopy(recipe)
    else:
        tree, where = _read(recipe)
        profiles = _profiles(tree, where)
    if profile is not None:
        if not profiles:
            raise RecipeError(f"{where} has no profiles, so there is none named '{profile}'")
        if profile not in profiles:
            raise RecipeError(f"{where}: {unknown_name('profile', profile, profiles)}")
        tree = profiles[profile]
        where = f"{where}, profile {profile}"
    for override in overrides or ():
        _apply(tree, override)
    result = _validate(tree, where)
    _check_schedule_keys(result, overrides or ())
    return result


def _check_schedule_keys(recipe: Recipe, overrides: Sequence[str]) -> None:
    """Refuse an override of ``schedule`` that the recipe's schedule ignores.

    A file may have such keys: a profile with another schedule inherits them.
    """
    name = recipe.schedule.name
    for override in overrides:
        section, _, key = override.partition("=")[0].strip().partition(".")
        if section != "schedule" or name in SCHEDULE_KEYS.get(key, (name,)):
            continue
        if getattr(recipe.schedule, key):
            raise RecipeError(
                f"--set {override} has no effect on the schedule {name} (only on {', '.join(SCHEDULE_KEYS[key])}): "
                "set schedule.name too, or leave it out"
            )
