"""How the product says that something is wrong: with an error of its own."""

import ast

from tests.packaging.tree import FLOORS, ROOT, dotted, modules

BARE = {"AssertionError", "LookupError", "KeyError", "IndexError", "RuntimeError", "Exception"}


def wrong(tree: ast.AST) -> list[int]:
    """Lines of statements that `python -O` would drop, or that raise an error which says nothing of the store."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
        or (isinstance(node, ast.Raise) and {name.id for name in ast.walk(node) if isinstance(name, ast.Name)} & BARE)
    ]


def test_a_broken_invariant_is_raised_as_one() -> None:
    """No assertion and no bare error in the product: BrokenInvariant asks for a report, the others name their facts."""
    sources = [module for floor in FLOORS for module in modules(ROOT / floor)]
    found = {dotted(module): lines for module in sources if (lines := wrong(ast.parse(module.read_text("utf-8"))))}
    assert found == {}


def test_an_assertion_and_a_bare_error_would_be_found() -> None:
    """The test above looks where it should."""
    assert wrong(ast.parse("assert it\nraise KeyError\nraise LookupError('it') from None\nraise ValueError")) == [
        1,
        2,
        3,
    ]
