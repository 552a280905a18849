"""Training recipes; installed as ``capszoo.recipes``."""

if __name__ != "capszoo.recipes":
    raise ImportError(
        f"this folder is the package capszoo.recipes, not '{__name__}': run `capszoo train`, "
        "or import capszoo.recipes"
    )
