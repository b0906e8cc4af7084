"""The site that `make docs` builds: Sphinx, the documents as they lie in the repository, API reference from docstrings.

The sources are the repository itself, so that links between documents are the same here and where it is hosted. The
pages of the reference are written to docs/site/api/, one for each public class. What a page refers to and is not there
is a warning, and a warning ends the build (`-W`). Nothing is loaded from elsewhere: offline.py looks.
"""

import inspect
import re
import runpy
from importlib import import_module
from pathlib import Path
from typing import Any

from pygments.lexers.special import TextLexer
from sphinx.builders.html import StandaloneHTMLBuilder

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

project = "duelog"
html_title = "duelog"
root_doc = "README"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/*.md",
    "docs/guide/*.md",
    "docs/site/*.md",
    "docs/site/api/*.rst",
]
exclude_patterns = [
    ".*",
    "build",
    "dist",
    "tests",
    "benchmarks",
    *(f"{each}/**" for each in ("duelog", "store", "tools")),
]
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_show_copyright = False
smartquotes = False  # options begin with two hyphens
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]
suppress_warnings = ["myst.header"]
pygments_style = "default"
autodoc_member_order = "bysource"
autoclass_content = "both"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 96
toc_object_entries_show_parents = "hide"

CONTENTS = {
    "Guide": (
        "docs/guide/send",
        "docs/guide/receive",
        "docs/guide/workers",
        "docs/guide/two-processes",
        "docs/guide/cancel",
        "docs/guide/schedules",
        "docs/guide/deduplicate",
        "docs/guide/asyncio",
        "docs/guide/policies",
        "docs/guide/documents",
        "docs/guide/transactions",
        "docs/guide/replicate",
        "docs/guide/testing",
        "docs/guide/errors",
        "docs/guide/inspect",
        "docs/guide/page",
        "docs/guide/command-line",
        "docs/guide/limits",
        "docs/recipes",
    ),
    "Reference": ("docs/site/reference", "docs/site/commands", "docs/configuration"),
    "Operating": (
        "docs/operations",
        "docs/metrics",
        "docs/audit",
        "docs/repair",
        "docs/broker",
        "docs/admin",
        "docs/scale",
        "docs/replication",
        "docs/drain",
        "docs/arrow",
        "docs/spark",
    ),
    "Inside": (
        "docs/design",
        "docs/format",
        "docs/protocol",
        "docs/testing",
        "docs/benchmarks",
        "CONTRIBUTING",
        "CHANGELOG",
    ),
}
"""Heading to pages, beside the text; every document is under one of them."""

PUBLIC = {
    name: module
    for module in ("duelog", "duelog.errors")
    for name in import_module(module).__all__
    if name not in {"DUPLICATE", "__version__"}
}
"""Public classes, and the module that callers import each from. Those of duelog.aio have the same names."""


nitpicky = True
nitpick_ignore_regex = [("py:.*", rf"(?!duelog\.(errors\.)?({'|'.join(PUBLIC)})\b).*")]
"""References from docstrings to public names have to lead somewhere; internal types in signatures have no page."""


def setup(app: Any) -> None:
    """Called by Sphinx."""
    write_reference()
    app.add_lexer("hex", TextLexer)
    app.add_builder(Site, override=True)
    app.connect("source-read", prepare_page)
    app.connect("autodoc-process-docstring", prepare_docstring)
    app.connect("autodoc-process-signature", hide_internal_constructor)
    app.connect("missing-reference", find_public)


# -- documents ---------------------------------------------------------------------------------

_MENTION = re.compile(r"(?<![\w/\[(`.-])docs/(\w+)\.md(?![\w`\])])")
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]*`|^    .*$)", re.MULTILINE | re.DOTALL)


def prepare_page(app: Any, name: str, source: list[str]) -> None:
    """Documents that a text only names become links; the start page gets the contents, one page the commands."""
    if name.startswith("docs/site/api/"):
        return
    parts = _CODE.split(source[0])
    parts[::2] = [_MENTION.sub(r"[\1.md](/docs/\1.md)", part) for part in parts[::2]]
    source[0] = "".join(parts)
    if name == "docs/site/commands":
        source[0] += "\n" + runpy.run_path(str(HERE / "commands.py"))["reference"]()
    if name == root_doc:
        for caption, pages in CONTENTS.items():
            listed = "".join(f"/{page}\n" for page in pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{listed}```\n"


class Site(StandaloneHTMLBuilder):
    """Sphinx's pages, of which the README is the start page: index.html."""

    def get_target_uri(self, docname: str, typ: str | None = None) -> str:
        return super().get_target_uri(_page_name(docname), typ)

    def get_output_path(self, page_name: str, /) -> Path:
        return super().get_output_path(_page_name(page_name))

    def get_outfilename(self, pagename: str) -> Any:
        """Sphinx 8 writes a page to the file that this gives, 9 to that of `get_output_path`."""
        return super().get_outfilename(_page_name(pagename))

    def dump_search_index(self) -> None:
        """Write the index of the search, which finds the file of a page by the name of its document."""
        super().dump_search_index()
        index = Path(self.outdir, self.searchindex_filename)
        text = index.read_text(encoding="utf-8")
        named = re.sub(rf'(docnames"?:\[[^]]*)"{root_doc}"', r'\1"index"', text, count=1)
        index.write_text(named, encoding="utf-8")


def _page_name(document: str) -> str:
    return "index" if document == root_doc else document


# -- the reference -----------------------------------------------------------------------------


def write_reference() -> None:
    """One page for each public class but the errors, which share one, and one for asyncio."""
    pages = {name: _page(name, f"{PUBLIC[name]}.{name}") for name in PUBLIC if PUBLIC[name] == "duelog"}
    pages["errors"] = "duelog.errors\n=============\n\n" + "".join(
        _directive(f"duelog.errors.{name}", "") for name in import_module("duelog.errors").__all__
    )
    pages["aio"] = "duelog.aio\n==========\n\n.. automodule:: duelog.aio\n   :members:\n   :inherited-members:\n"
    folder = HERE / "api"
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.rst"):
        if path.stem not in pages:
            path.unlink()
    for name, text in pages.items():
        path = folder / f"{name}.rst"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def _page(title: str, name: str) -> str:
    return f"{title}\n{'=' * len(title)}\n\n{_directive(name)}"


def _directive(name: str, members: str = "   :members:\n   :inherited-members: tuple, int, str, ValueError\n") -> str:
    module, _, attribute = name.rpartition(".")
    kind = "autoclass" if inspect.isclass(getattr(import_module(module), attribute)) else "autodata"
    return f".. {kind}:: {name}\n{members if kind == 'autoclass' else ''}\n"


_ERROR = re.compile(rf"\b({'|'.join(name for name, module in PUBLIC.items() if module == 'duelog.errors')})\b")
_ANY_SPAN = re.compile(r"(`+[^`\n]+`+)")
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def prepare_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """The project's docstrings as reStructuredText: code in backticks, errors as links, fields as a list."""
    made: list[str] = []
    in_code = False
    for paragraph in re.split(r"\n\s*\n", "\n".join(lines)):
        is_code = bool(paragraph) and all(line.startswith("    ") for line in paragraph.splitlines())
        if is_code and not in_code:
            made.append(".. code-block:: python")
        made.append(paragraph if is_code else _paragraph(paragraph, _names(obj)))
        in_code = is_code
    lines[:] = [*"\n\n".join(made).splitlines(), ""]


def _names(obj: Any) -> set[str]:
    """The parameters of a function; the parameters, fields and properties of a class."""
    found = {
        name for cls in getattr(obj, "__mro__", ()) for name in (*vars(cls), *vars(cls).get("__annotations__", ()))
    }
    try:
        return found | set(inspect.signature(obj).parameters)
    except (TypeError, ValueError):
        return found


def _paragraph(text: str, names: set[str]) -> str:
    """A paragraph that begins with a field (`name: text`) is a list of its fields, each from its name to the next."""
    parts = re.split(r"(?:^|(?<=[.;)] )|(?<=\n))([a-z_]\w*(?:, [a-z_]\w*)*): ", text)
    fields: list[list[str]] = []
    for name, rest in zip(["", *parts[1::2]], parts[::2], strict=True):
        if name and (set(name.split(", ")) <= names or (not names and not fields)):
            fields.append([name, rest])
        elif fields:
            fields[-1][1] += f"{name}: {rest}"
        elif name or rest.strip():
            return _marked(text)
    return "\n".join(f"* **{name}**: {_marked(' '.join(rest.split()))}" for name, rest in fields) or text


def _marked(text: str) -> str:
    """Errors and code in backticks as reStructuredText has them."""
    parts = _ANY_SPAN.split(text)
    parts[::2] = [_ERROR.sub(r"`\1`", part) for part in parts[::2]]
    return _SPAN.sub(_code, "".join(parts))


def _code(match: re.Match[str]) -> str:
    """A public name, or a method of one, as a link; a field of one leads to its class, which describes its fields."""
    name, _, attribute = match[1].partition("(")[0].removeprefix("duelog.").removeprefix("errors.").partition(".")
    if name not in PUBLIC:
        return f"``{match[1]}``"
    target = f"{PUBLIC[name]}.{name}"
    if attribute and attribute not in getattr(getattr(import_module(PUBLIC[name]), name), "__dataclass_fields__", {}):
        target += f".{attribute}"
    return f":py:obj:`{match[1]} <{target}>`"


GIVEN_OUT = {"DelayedStore", "Documents", "Producer", "Subscription", "SubscriptionAdmin", "Topic", "ReceivedMessage"}
"""Classes whose objects callers are given and do not make."""


def hide_internal_constructor(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str, returns: str
) -> tuple[str, str] | None:
    """Leave out what the library makes its objects of: it is not for callers."""
    return ("", returns) if what == "class" and name.rpartition(".")[2] in GIVEN_OUT else None


def find_public(app: Any, env: Any, node: Any, text: Any) -> Any:
    """A type by the module that defines it leads to the page that has it by the module that callers import."""
    name = node.get("reftarget", "").rpartition(".")[2]
    if node.get("refdomain") != "py" or name not in PUBLIC:
        return None
    return env.get_domain("py").resolve_xref(
        env, node["refdoc"], app.builder, "obj", f"{PUBLIC[name]}.{name}", node, text
    )
