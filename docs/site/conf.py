"""Configures the documentation site: `make docs` writes it to build/docs, without warnings.

The pages are the repository's Markdown files, where they lie, so that their links hold on the site
and on a code host. `reference.py` documents the public names from their docstrings.
"""

import shutil
import sys
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert
from sphinx import addnodes
from sphinx.util import logging

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT), str(ROOT / "tests")]

from reference import MODULES  # noqa: E402

project = "attnfast"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "reference"]
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "bench/results/*.md"]
exclude_patterns = [".*", "build", "demo", "runs", "docs/site"]

myst_heading_anchors = 3
napoleon_use_ivar = True
napoleon_custom_sections = ["Returns"]  # prose, in which a colon ends no type
toc_object_entries_show_parents = "hide"
python_maximum_signature_line_length = 88
nitpicky = True
TYPE_VARIABLES = "M_contra|S|P|T|Others|History|Packed"
nitpick_ignore_regex = [
    ("py:.*", r"(torch|collections|contextlib|pathlib|typing_extensions)\..*|Tensor"),
    ("py:(class|obj)", rf"(attnfast\.\w+\._?\w+\.|typing\.~)?({TYPE_VARIABLES})"),
    # Private types, in the signatures of public names.
    ("py:class", rf"(?!({'|'.join(MODULES)})\.\w+$)attnfast\..*|GrowableBuffer|SharedKeys"),
    ("py:exc", "InputError"),
]

html_theme = "furo"
html_title = "attnfast"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_copyright = False

REPORTS = sorted((ROOT / "bench" / "results").glob("*.md"))
#: The pages below a page, by headings of the sidebar.
CONTENTS = {
    "README": {
        "Guide": "docs/install docs/attention docs/memory docs/spans docs/history docs/copying "
        "docs/recurrent docs/search docs/replace docs/adapters docs/serving docs/diagnostics "
        "docs/course/README",
        "Models": "docs/translate docs/ablations docs/speech docs/captioning docs/reading "
        "docs/pointers docs/turing",
        "Reference": "docs/api docs/backends docs/numerics docs/environment",
        "Performance": "docs/speed docs/benchmarks docs/performance docs/notes/optimisation "
        "docs/notes/graphs",
        "Development": "docs/architecture docs/testing CONTRIBUTING SECURITY CHANGELOG",
    },
    "docs/course/README": {
        "": "bottleneck additive scores softmax numbers decoders coverage local memory "
        "self-attention"
    },
    "docs/api": {
        "": "\n".join(
            f"{x.removeprefix('attnfast.')} <api/{x.rpartition('.')[2]}>" for x in MODULES
        )
    },
    "docs/benchmarks": {"": "\n".join(f"{x.stem} <../bench/results/{x.stem}>" for x in REPORTS)},
}


def add_contents(app, docname, source):
    """Append the pages below a page, which its links name already."""
    for caption, pages in CONTENTS.get(docname, {}).items():
        entries = pages if "\n" in pages else "\n".join(pages.split())
        options = f":hidden:\n:caption: {caption}" if caption else ":hidden:"
        source[0] += f"\n```{{toctree}}\n{options}\n\n{entries}\n```\n"


def name_folders(app, doctree):
    """Take the links off folders, which have no page."""
    for link in list(doctree.findall(addnodes.pending_xref)):
        if link["reftype"] == "myst" and link["refdomain"] is None:
            page = ROOT / link["refdoc"]
            if (page.parent / link["reftarget"]).is_dir():
                link.replace_self(link.children)


def write_formula(translator, node, display="inline"):
    """Write a formula as MathML, which browsers draw themselves."""
    text = node.astext()
    if "\\\\" in text:
        text = rf"\begin{{align*}}{text}\end{{align*}}"
    formula = convert(text, display=display)
    if "\\" in formula:
        logging.getLogger(__name__).warning("MathML lacks a command of %s", text, location=node)
    translator.body.append(formula)
    raise nodes.SkipNode


def write_display(translator, node):
    """Write a formula in lines of its own."""
    translator.body.append(translator.starttag(node, "div", CLASS="math"))
    try:
        write_formula(translator, node, "block")
    finally:
        translator.body.append("</div>")


def name_first_page(app, exception):
    """Let the site open with its first page."""
    if exception is None:
        out = Path(app.outdir)
        shutil.copy(out / f"{root_doc}.html", out / "index.html")


def setup(app):
    """Register what the functions above do."""
    app.add_html_math_renderer("mathml", (write_formula, None), (write_display, None))
    app.connect("source-read", add_contents)
    app.connect("doctree-read", name_folders)
    app.connect("build-finished", name_first_page)
