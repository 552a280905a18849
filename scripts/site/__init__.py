"""The documentation site: ``python -m scripts.site`` (``make site``) assembles its pages and runs Sphinx over them."""
