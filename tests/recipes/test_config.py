

PROFILES = {
    **SMALL,
    "optimizer": {"name": "sgd", "lr": 0.1, "options": {"nesterov": True}},
    "clip_grad": 1.0,
    "profiles": {
        "short": {"epochs": 1, "optimizer": {"lr": 0.5}, "data": {"augment": {"shift": 1}}, "clip_grad": None},
        "shorter": {"optimizer": {"name": "adamw", "options": None}},
    },
}


def write_recipe(path: Path, tree: dict) -> Path:
    path.write_text(yaml.safe_dump(tree))
    return path


def test_a_profile_is_laid_over_the_paper_s_settings(tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "r.yaml", PROFILES)
    assert list_profiles(path) == ["short", "shorter"]
    paper, short, shorter = (load_recipe(path, profile=name) for name in (None, "short", "shorter"))
    assert (paper.profile, paper.epochs, paper.optimizer.lr, paper.clip_grad) == (None, 2, 0.1, 1.0)
    assert (short.profile, short.epochs, short.optimizer.lr, short.clip_grad) == ("short", 1, 0.5, None)
    assert short.optimizer.name == "sgd" and short.optimizer.options == {"nesterov": True}
    assert short.data.name == "mnist" and short.data.augment.shift == 1 and paper.data.augment.shift == 0
    assert shorter.optimizer.name == "adamw" and shorter.optimizer.options == {} and shorter.epochs == 2
    assert paper.name == short.name, "one tag, whatever the schedule"
    assert load_recipe(path, ["epochs=9"], "short").epochs == 9, "--set comes after the profile"
    assert load_recipe(write_recipe(tmp_path / "again.yaml", short.model_dump(mode="json"))) == short


@pytest.mark.parametrize(
    ("profiles", "chosen", "expected"),
    [
        ({"short": {}}, "shrot", "unknown profile 'shrot': did you mean 'short'"),
        (None, "short", "has no profiles, so there is none named 'short'"),
        ({"short": {"epoch": 1}}, None, "r.yaml, profile short: unknown key 'epoch': did you mean 'epochs'"),
        ({"short": {"epochs": 0}}, "short", "r.yaml, profile short: 'epochs: 0' is wrong"),
        ({"short": {"tag": "other"}}, "short", "profile short: 'tag' is the recipe's"),
        ({"short": {"data": {"name": "cifar10"}}}, "short", "profile short: 'data.name' is the recipe's"),
        ({"short": {"profiles": {}}}, "short", "profile short: 'profiles' is the recipe's"),
        (["short"], "short", "'profiles' must be names with settings"),
        ({"short": 3}, "short", "'profiles' must be names with settings"),
    ],
)
def test_profile_mistakes_are_one_line(
    tmp_path: Path, profiles: object, chosen: str | None, expected: str
) -> None:
    path = write_recipe(tmp_path / "r.yaml", {**SMALL, "profiles": profiles})
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, profile=chosen)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_set_does_not_choose_a_profile(tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "r.yaml", PROFILES)
    with pytest.raises(RecipeError, match="chosen by --profile"):
        load_recipe(path, ["profile=short"])


PROFILES = {
    **SMALL,
    "optimizer": {"name": "sgd", "lr": 0.1, "options": {"nesterov": True}},
    "clip_grad": 1.0,
    "profiles": {
        "short": {"epochs": 1, "optimizer": {"lr": 0.5}, "data": {"augment": {"shift": 1}}, "clip_grad": None},
        "shorter": {"optimizer": {"name": "adamw", "options": None}},
    },
}


def write_recipe(path: Path, tree: dict) -> Path:
    path.write_text(yaml.safe_dump(tree))
    return path


def test_a_profile_is_laid_over_the_paper_s_settings(tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "r.yaml", PROFILES)
    assert list_profiles(path) == ["short", "shorter"]
    paper, short, shorter = (load_recipe(path, profile=name) for name in (None, "short", "shorter"))
    assert (paper.profile, paper.epochs, paper.optimizer.lr, paper.clip_grad) == (None, 2, 0.1, 1.0)
    assert (short.profile, short.epochs, short.optimizer.lr, short.clip_grad) == ("short", 1, 0.5, None)
    assert short.optimizer.name == "sgd" and short.optimizer.options == {"nesterov": True}
    assert short.data.name == "mnist" and short.data.augment.shift == 1 and paper.data.augment.shift == 0
    assert shorter.optimizer.name == "adamw" and shorter.optimizer.options == {} and shorter.epochs == 2
    assert paper.name == short.name, "one tag, whatever the schedule"
    assert load_recipe(path, ["epochs=9"], "short").epochs == 9, "--set comes after the profile"
    assert load_recipe(write_recipe(tmp_path / "again.yaml", short.model_dump(mode="json"))) == short


@pytest.mark.parametrize(
    ("profiles", "chosen", "expected"),
    [
        ({"short": {}}, "shrot", "unknown profile 'shrot': did you mean 'short'"),
        (None, "short", "has no profiles, so there is none named 'short'"),
        ({"short": {"epoch": 1}}, None, "r.yaml, profile short: unknown key 'epoch': did you mean 'epochs'"),
        ({"short": {"epochs": 0}}, "short", "r.yaml, profile short: 'epochs: 0' is wrong"),
        ({"short": {"tag": "other"}}, "short", "profile short: 'tag' is the recipe's"),
        ({"short": {"data": {"name": "cifar10"}}}, "short", "profile short: 'data.name' is the recipe's"),
        ({"short": {"profiles": {}}}, "short", "profile short: 'profiles' is the recipe's"),
        (["short"], "short", "'profiles' must be names with settings"),
        ({"short": 3}, "short", "'profiles' must be names with settings"),
    ],
)
def test_profile_mistakes_are_one_line(
    tmp_path: Path, profiles: object, chosen: str | None, expected: str
) -> None:
    path = write_recipe(tmp_path / "r.yaml", {**SMALL, "profiles": profiles})
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, profile=chosen)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_set_does_not_choose_a_profile(tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "r.yaml", PROFILES)
    with pytest.raises(RecipeError, match="chosen by --profile"):
        load_recipe(path, ["profile=short"])


PROFILES = {
    **SMALL,
    "optimizer": {"name": "sgd", "lr": 0.1, "options": {"nesterov": True}},
    "clip_grad": 1.0,
    "profiles": {
        "short": {"epochs": 1, "optimizer": {"lr": 0.5}, "data": {"augment": {"shift": 1}}, "clip_grad": None},
        "shorter": {"optimizer": {"name": "adamw", "options": None}},
    },
}


def write_recipe(path: Path, tree: dict) -> Path:
    path.write_text(yaml.safe_dump(tree))
    return path


def test_a_profile_is_laid_over_the_paper_s_settings(tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "r.yaml", PROFILES)
    assert list_profiles(path) == ["short", "shorter"]
    paper, short, shorter = (load_recipe(path, profile=name) for name in (None, "short", "shorter"))
    assert (paper.profile, paper.epochs, paper.optimizer.lr, paper.clip_grad) == (None, 2, 0.1, 1.0)
    assert (short.profile, short.epochs, short.optimizer.lr, short.clip_grad) == ("short", 1, 0.5, None)
    assert short.optimizer.name == "sgd" and short.optimizer.options == {"nesterov": True}
    assert short.data.name == "mnist" and short.data.augment.shift == 1 and paper.data.augment.shift == 0
    assert shorter.optimizer.name == "adamw" and shorter.optimizer.options == {} and shorter.epochs == 2
    assert paper.name == short.name, "one tag, whatever the schedule"
    assert load_recipe(path, ["epochs=9"], "short").epochs == 9, "--set comes after the profile"
    assert load_recipe(write_recipe(tmp_path / "again.yaml", short.model_dump(mode="json"))) == short


@pytest.mark.parametrize(
    ("profiles", "chosen", "expected"),
    [
        ({"short": {}}, "shrot", "unknown profile 'shrot': did you mean 'short'"),
        (None, "short", "has no profiles, so there is none named 'short'"),
        ({"short": {"epoch": 1}}, None, "r.yaml, profile short: unknown key 'epoch': did you mean 'epochs'"),
        ({"short": {"epochs": 0}}, "short", "r.yaml, profile short: 'epochs: 0' is wrong"),
        ({"short": {"tag": "other"}}, "short", "profile short: 'tag' is the recipe's"),
        ({"short": {"data": {"name": "cifar10"}}}, "short", "profile short: 'data.name' is the recipe's"),
        ({"short": {"profiles": {}}}, "short", "profile short: 'profiles' is the recipe's"),
        (["short"], "short", "'profiles' must be names with settings"),
        ({"short": 3}, "short", "'profiles' must be names with settings"),
    ],
)
def test_profile_mistakes_are_one_line(
    tmp_path: Path, profiles: object, chosen: str | None, expected: str
) -> None:
    path = write_recipe(tmp_path / "r.yaml", {**SMALL, "profiles": profiles})
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, profile=chosen)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_set_does_not_choose_a_profile(tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "r.yaml", PROFILES)
    with pytest.raises(RecipeError, match="chosen by --profile"):
        load_recipe(path, ["profile=short"])


PROFILES = {
    **SMALL,
    "optimizer": {"name": "sgd", "lr": 0.1, "options": {"nesterov": True}},
    "clip_grad": 1.0,
    "profiles": {
        "short": {"epochs": 1, "optimizer": {"lr": 0.5}, "data": {"augment": {"shift": 1}}, "clip_grad": None},
        "shorter": {"optimizer": {"name": "adamw", "options": None}},
    },
}


def write_recipe(path: Path, tree: dict) -> Path:
    path.write_text(yaml.safe_dump(tree))
    return path


def test_a_profile_is_laid_over_the_paper_s_settings(tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "r.yaml", PROFILES)
    assert list_profiles(path) == ["short", "shorter"]
    paper, short, shorter = (load_recipe(path, profile=name) for name in (None, "short", "shorter"))
    assert (paper.profile, paper.epochs, paper.optimizer.lr, paper.clip_grad) == (None, 2, 0.1, 1.0)
    assert (short.profile, short.epochs, short.optimizer.lr, short.clip_grad) == ("short", 1, 0.5, None)
    assert short.optimizer.name == "sgd" and short.optimizer.options == {"nesterov": True}
    assert short.data.name == "mnist" and short.data.augment.shift == 1 and paper.data.augment.shift == 0
    assert shorter.optimizer.name == "adamw" and shorter.optimizer.options == {} and shorter.epochs == 2
    assert paper.name == short.name, "one tag, whatever the schedule"
    assert load_recipe(path, ["epochs=9"], "short").epochs == 9, "--set comes after the profile"
    assert load_recipe(write_recipe(tmp_path / "again.yaml", short.model_dump(mode="json"))) == short


@pytest.mark.parametrize(
    ("profiles", "chosen", "expected"),
    [
        ({"short": {}}, "shrot", "unknown profile 'shrot': did you mean 'short'"),
        (None, "short", "has no profiles, so there is none named 'short'"),
        ({"short": {"epoch": 1}}, None, "r.yaml, profile short: unknown key 'epoch': did you mean 'epochs'"),
        ({"short": {"epochs": 0}}, "short", "r.yaml, profile short: 'epochs: 0' is wrong"),
        ({"short": {"tag": "other"}}, "short", "profile short: 'tag' is the recipe's"),
        ({"short": {"data": {"name": "cifar10"}}}, "short", "profile short: 'data.name' is the recipe's"),
        ({"short": {"profiles": {}}}, "short", "profile short: 'profiles' is the recipe's"),
        (["short"], "short", "'profiles' must be names with settings"),
        ({"short": 3}, "short", "'profiles' must be names with settings"),
    ],
)
def test_profile_mistakes_are_one_line(
    tmp_path: Path, profiles: object, chosen: str | None, expected: str
) -> None:
    path = write_recipe(tmp_path / "r.yaml", {**SMALL, "profiles": profiles})
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, profile=chosen)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_set_does_not_choose_a_profile(tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "r.yaml", PROFILES)
    with pytest.raises(RecipeError, match="chosen by --profile"):
        load_recipe(path, ["profile=short"])


PROFILES = {
    **SMALL,
    "optimizer": {"name": "sgd", "lr": 0.1, "options": {"nesterov": True}},
    "clip_grad": 1.0,
    "profiles": {
        "short": {"epochs": 1, "optimizer": {"lr": 0.5}, "data": {"augment": {"shift": 1}}, "clip_grad": None},
        "shorter": {"optimizer": {"name": "adamw", "options": None}},
    },
}


def write_recipe(path: Path, tree: dict) -> Path:
    path.write_text(yaml.safe_dump(tree))
    return path


def test_a_profile_is_laid_over_the_paper_s_settings(tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "r.yaml", PROFILES)
    assert list_profiles(path) == ["short", "shorter"]
    paper, short, shorter = (load_recipe(path, profile=name) for name in (None, "short", "shorter"))
    assert (paper.profile, paper.epochs, paper.optimizer.lr, paper.clip_grad) == (None, 2, 0.1, 1.0)
    assert (short.profile, short.epochs, short.optimizer.lr, short.clip_grad) == ("short", 1, 0.5, None)
    assert short.optimizer.name == "sgd" and short.optimizer.options == {"nesterov": True}
    assert short.data.name == "mnist" and short.data.augment.shift == 1 and paper.data.augment.shift == 0
    assert shorter.optimizer.name == "adamw" and shorter.optimizer.options == {} and shorter.epochs == 2
    assert paper.name == short.name, "one tag, whatever the schedule"
    assert load_recipe(path, ["epochs=9"], "short").epochs == 9, "--set comes after the profile"
    assert load_recipe(write_recipe(tmp_path / "again.yaml", short.model_dump(mode="json"))) == short


@pytest.mark.parametrize(
    ("profiles", "chosen", "expected"),
    [
        ({"short": {}}, "shrot", "unknown profile 'shrot': did you mean 'short'"),
        (None, "short", "has no profiles, so there is none named 'short'"),
        ({"short": {"epoch": 1}}, None, "r.yaml, profile short: unknown key 'epoch': did you mean 'epochs'"),
        ({"short": {"epochs": 0}}, "short", "r.yaml, profile short: 'epochs: 0' is wrong"),
        ({"short": {"tag": "other"}}, "short", "profile short: 'tag' is the recipe's"),
        ({"short": {"data": {"name": "cifar10"}}}, "short", "profile short: 'data.name' is the recipe's"),
        ({"short": {"profiles": {}}}, "short", "profile short: 'profiles' is the recipe's"),
        (["short"], "short", "'profiles' must be names with settings"),
        ({"short": 3}, "short", "'profiles' must be names with settings"),
    ],
)
def test_profile_mistakes_are_one_line(
    tmp_path: Path, profiles: object, chosen: str | None, expected: str
) -> None:
    path = write_recipe(tmp_path / "r.yaml", {**SMALL, "profiles": profiles})
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, profile=chosen)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_set_does_not_choose_a_profile(tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "r.yaml", PROFILES)
    with pytest.raises(RecipeError, match="chosen by --profile"):
        load_recipe(path, ["profile=short"])


PROFILES = {
    **SMALL,
    "optimizer": {"name": "sgd", "lr": 0.1, "options": {"nesterov": True}},
    "clip_grad": 1.0,
    "profiles": {
        "short": {"epochs": 1, "optimizer": {"lr": 0.5}, "data": {"augment": {"shift": 1}}, "clip_grad": None},
        "shorter": {"optimizer": {"name": "adamw", "options": None}},
    },
}


def write_recipe(path: Path, tree: dict) -> Path:
    path.write_text(yaml.safe_dump(tree))
    return path


def test_a_profile_is_laid_over_the_paper_s_settings(tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "r.yaml", PROFILES)
    assert list_profiles(path) == ["short", "shorter"]
    paper, short, shorter = (load_recipe(path, profile=name) for name in (None, "short", "shorter"))
    assert (paper.profile, paper.epochs, paper.optimizer.lr, paper.clip_grad) == (None, 2, 0.1, 1.0)
    assert (short.profile, short.epochs, short.optimizer.lr, short.clip_grad) == ("short", 1, 0.5, None)
    assert short.optimizer.name == "sgd" and short.optimizer.options == {"nesterov": True}
    assert short.data.name == "mnist" and short.data.augment.shift == 1 and paper.data.augment.shift == 0
    assert shorter.optimizer.name == "adamw" and shorter.optimizer.options == {} and shorter.epochs == 2
    assert paper.name == short.name, "one tag, whatever the schedule"
    assert load_recipe(path, ["epochs=9"], "short").epochs == 9, "--set comes after the profile"
    assert load_recipe(write_recipe(tmp_path / "again.yaml", short.model_dump(mode="json"))) == short


@pytest.mark.parametrize(
    ("profiles", "chosen", "expected"),
    [
        ({"short": {}}, "shrot", "unknown profile 'shrot': did you mean 'short'"),
        (None, "short", "has no profiles, so there is none named 'short'"),
        ({"short": {"epoch": 1}}, None, "r.yaml, profile short: unknown key 'epoch': did you mean 'epochs'"),
        ({"short": {"epochs": 0}}, "short", "r.yaml, profile short: 'epochs: 0' is wrong"),
        ({"short": {"tag": "other"}}, "short", "profile short: 'tag' is the recipe's"),
        ({"short": {"data": {"name": "cifar10"}}}, "short", "profile short: 'data.name' is the recipe's"),
        ({"short": {"profiles": {}}}, "short", "profile short: 'profiles' is the recipe's"),
        (["short"], "short", "'profiles' must be names with settings"),
        ({"short": 3}, "short", "'profiles' must be names with settings"),
    ],
)
def test_profile_mistakes_are_one_line(
    tmp_path: Path, profiles: object, chosen: str | None, expected: str
) -> None:
    path = write_recipe(tmp_path / "r.yaml", {**SMALL, "profiles": profiles})
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, profile=chosen)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_set_does_not_choose_a_profile(tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "r.yaml", PROFILES)
    with pytest.raises(RecipeError, match="chosen by --profile"):
        load_recipe(path, ["profile=short"])
