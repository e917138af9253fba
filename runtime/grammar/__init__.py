"""Grammars that hold a reply: checks at admission, and matchers that make token masks.

llguidance does the work. A grammar is its Lark text, in which a JSON schema is a `%json` term.
Everything that a client may have written is bounded before it is compiled, and errors are in words
of our own.
"""

from hearth.runtime.grammar.checks import (
    MOST_TOOLS,
    ClientGrammar,
    available,
    check_schemas,
    json_term,
    lark_grammar,
    regex_grammar,
    regex_term,
    require,
    schema_grammars,
    try_grammar,
    unforced,
)
from hearth.runtime.grammar.compiler import FIELD, GrammarCompiler, GrammarMatcher

__all__ = [
    "FIELD",
    "MOST_TOOLS",
    "ClientGrammar",
    "GrammarCompiler",
    "GrammarMatcher",
    "available",
    "check_schemas",
    "json_term",
    "lark_grammar",
    "regex_grammar",
    "regex_term",
    "require",
    "schema_grammars",
    "try_grammar",
    "unforced",
]
