"""Sphinx's configuration. `make docs` builds the pages into docs/_build/html."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from distributor.version import __version__

ROOT = Path(__file__).resolve().parents[1]

project = "distributor"
copyright = "the distributor authors"
release = version = __version__

extensions = [
    "myst_nb",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinxcontrib.mermaid",
]
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]
nitpicky = False
default_role = "py:obj"

html_theme = "furo"
html_title = f"distributor {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_copy_source = False
html_search_scorer = str(ROOT / "docs" / "scorer.js")
# Programs, files and commands can be copied, the latter without prompts. Output cannot.
copybutton_selector = "div[class*=highlight-]:not(.highlight-text, .highlight-none) pre"
copybutton_exclude = ".linenos, .gp, .go"

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
autosummary_generate = False
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False


def add_summary(
    app: Sphinx, what: str, name: str, module: Any, options: Any, lines: list[str]
) -> None:
    """Put a table of what a module's page describes below the module's docstring."""
    if what == "module":
        names = [name for name in public_names(module) if described(name, options)]
        lines += ["", ".. autosummary::", "   :nosignatures:", ""]
        lines += [f"   {name}" for name in names]


def public_names(module: Any) -> list[str]:
    """Return ``__all__`` of a module without constants, or else what the module defines."""
    things = vars(module)
    defined = [name for name, thing in things.items() if is_defined_in(module, thing)]
    names = getattr(module, "__all__", defined)
    return [name for name in names if name[0] != "_" and not isinstance(getattr(module, name), str)]


def is_defined_in(module: Any, thing: object) -> bool:
    """Return whether a class or function is a module's own."""
    return getattr(thing, "__module__", None) == module.__name__


def described(name: str, options: Any) -> bool:
    """Return whether a directive with these options describes a member."""
    members = options.members if isinstance(options.members, list) else [name]
    return name in members and name not in (options.exclude_members or ())


def setup(app: Sphinx) -> None:
    """Add the tables."""
    app.connect("autodoc-process-docstring", add_summary)
