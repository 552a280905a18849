"""Training recipes; installed as `capszoo.recipes`."""

if __name__ != "capszoo.recipes":
    raise ImportError(
        f"this folder is the package capszoo.recipes, not '{__name__}': run `python -m capszoo.recipes.train`, "
        "or import capszoo.recipes"
    )
