"""How Sphinx builds the manual: `make docs`."""

from importlib.metadata import version as version_of

project = "optcc"
author = "the optcc authors"
copyright = "the optcc authors; Apache-2.0"
release = version_of("optcc")
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["attrs_block", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "optcc"
html_copy_source = False

autodoc_mock_imports = ["torch"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
