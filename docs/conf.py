"""Sphinx's settings; scripts/site assembles the pages and calls it."""

project = "capszoo"
copyright = "the capszoo authors"
extensions = ["myst_nb"]
html_theme = "pydata_sphinx_theme"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = "capszoo"
html_show_sourcelink = False
html_copy_source = False
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
nb_execution_mode = "off"  # a test executes the notebooks
suppress_warnings = ["misc.highlighting_failure"]
html_theme_options = {
    "navbar_align": "left",
    "navigation_depth": 2,
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
}
