"""Sphinx's configuration. `make docs` builds the pages into docs/_build/html."""

from __future__ import annotations

import shutil
from pathlib import Path

from distributor.version import __version__

ROOT = Path(__file__).resolve().parents[1]

project = "distributor"
copyright = "the distributor authors"
release = version = __version__

extensions = [
    "myst_nb",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinxcontrib.mermaid",
]
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]
nitpicky = False
default_role = "py:obj"

html_theme = "furo"
html_title = "distributor"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_copy_source = False

# Markdown and notebooks. Notebooks are shown with their stored outputs; `make notebooks` runs them.
# Sphinx reads only below docs/, so that they are copied there.
NOTEBOOKS = ROOT / "docs" / "tutorials" / "notebooks"
NOTEBOOKS.mkdir(exist_ok=True)
for notebook in (ROOT / "notebooks").glob("*.ipynb"):
    shutil.copy2(notebook, NOTEBOOKS)
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["colon_fence", "deflist"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 3
suppress_warnings = ["mystnb.unknown_mime_type"]

# The API, from the docstrings.
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"members": True}
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False
