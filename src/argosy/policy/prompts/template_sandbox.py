"""Sandbox of Jinja in which templates read plain data only, within bounds of work and of output.

Jinja's own sandbox forbids attributes and calls that are known to be harmful, but bounds neither time nor memory.
Here a template may contain only what `_NODES`, `FILTERS` and `TESTS` list. Nothing of it calls a method or reads an
attribute of a Python object. Loops, comparisons, slices and filters are rewritten, so that each charges a
`RenderBudget`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
import msgspec
from jinja2 import nodes, pass_context
from jinja2.runtime import Context, LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from argosy.policy.prompts.prompt_errors import PromptError

MAX_OUTPUT_CHARS = 1 << 20
"""Maximum length of what a prompt renders to."""
MAX_WORK = 100_000
"""Maximum number of steps of one rendering: evaluated expressions, and pieces of `CHARS_PER_STEP` characters."""
CHARS_PER_STEP = 64
MAX_NODES = 2_000
"""Maximum number of expressions of a template. The largest one compiles in about 0.4 s, in a thread."""
MAX_DEPTH = 40
MAX_NESTED_LOOPS = 4

_BUDGET = "_budget"
"""Name of the budget in the context. Names of templates do not begin with an underscore."""
_LOOP_FIELDS = frozenset({"index", "index0", "first", "last", "length"})
_NODES: tuple[type[nodes.Node], ...] = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.If, nodes.For),
    *(nodes.Name, nodes.Const, nodes.List, nodes.Tuple, nodes.Getattr, nodes.Getitem, nodes.Slice),
    *(nodes.Filter, nodes.Test, nodes.Compare, nodes.Operand, nodes.CondExpr),
    *(nodes.And, nodes.Or, nodes.Not, nodes.Neg),
)
TESTS = ("defined", "undefined", "none", "string", "number", "boolean", "mapping", "sequence")


class RenderBudget:
    """Work and output that the rendering of one prompt may still cost."""

    def __init__(self) -> None:
        self._work = MAX_WORK
        self._output_chars = MAX_OUTPUT_CHARS

    def charge_work(self, steps: float) -> None:
        """Charge a number of steps. Raises PromptError if they are too many."""
        self._work -= math.ceil(steps)
        if self._work < 0:
            raise PromptError(
                "rendering takes too many steps. Use smaller values, fewer or shorter loops."
            )

    def charge_output(self, chars: int) -> None:
        """Charge a part of the output. Raises PromptError if it is too long."""
        self._output_chars -= chars
        if self._output_chars < 0:
            raise PromptError(
                f"it renders to more than {MAX_OUTPUT_CHARS:,} characters. Use smaller values."
            )

    def weigh(self, value: Any) -> None:  # noqa: ANN401 - any JSON
        """Charge the size of a value with all that it contains."""
        stack = [value]
        while stack:
            each = stack.pop()
            if isinstance(each, str):
                self.charge_work(1 + len(each) / CHARS_PER_STEP)
            elif isinstance(each, list | tuple):
                self.charge_work(1 + len(each))
                stack.extend(each)
            elif isinstance(each, Mapping):
                self.charge_work(1 + len(each))
                stack.extend(each.values())
            elif isinstance(each, Undefined):
                str(each)  # raises
            else:
                self.charge_work(1)


def to_text(value: Any) -> str:  # noqa: ANN401 - any JSON
    """Return a value as it stands in a text. Raises PromptError for a list, a mapping or null."""
    match value:
        case str():
            return value
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case Undefined():
            return str(value)  # raises
        case None:
            raise PromptError("a variable is null. Give it a value, or use `| default(...)`.")
        case _:
            kind = "mapping" if isinstance(value, Mapping) else "list"
            raise PromptError(f"a {kind} is no text. Use a field of it, a loop, or `| tojson`.")


def _join(items: Any, separator: Any = "") -> str:  # noqa: ANN401 - any JSON
    if not isinstance(items, list | tuple):
        raise PromptError("`join` needs a list.")
    texts, between = [to_text(item) for item in items], to_text(separator)
    if sum(map(len, texts)) + len(texts) * len(between) > MAX_OUTPUT_CHARS:
        raise PromptError("`join` makes too long a text. Use smaller values.")
    return between.join(texts)


def _length(value: Any) -> int:  # noqa: ANN401 - any JSON
    if not isinstance(value, str | list | tuple | Mapping):
        raise PromptError("`length` needs a text, a list or a mapping.")
    return len(value)


def _default(value: Any, default: Any = "") -> Any:  # noqa: ANN401 - any JSON
    return default if value is None or isinstance(value, Undefined) else value


def _items(value: Any) -> list[tuple[str, Any]]:  # noqa: ANN401 - any JSON
    if not isinstance(value, Mapping):
        raise PromptError("`items` needs a mapping.")
    return list(value.items())


def _at(index: int) -> Callable[[Any], Any]:
    def select(value: Any) -> Any:  # noqa: ANN401 - any JSON
        if not isinstance(value, str | list | tuple) or not value:
            raise PromptError("`first` and `last` need a text or a list that is not empty.")
        return value[index]

    return select


FILTERS: dict[str, Callable[..., Any]] = {
    "default": _default,
    "first": _at(0),
    "items": _items,
    "join": _join,
    "last": _at(-1),
    "length": _length,
    "lower": lambda value: to_text(value).lower(),
    "tojson": lambda value: msgspec.json.encode(value).decode(),
    "trim": lambda value: to_text(value).strip(),
    "upper": lambda value: to_text(value).upper(),
}


def _budget_of(context: Context) -> RenderBudget:
    budget: RenderBudget = context.parent[_BUDGET]
    return budget


@pass_context
def _weighed(context: Context, value: Any) -> Any:  # noqa: ANN401 - any JSON
    _budget_of(context).weigh(value)
    return value


@pass_context
def _turns(context: Context, items: Any, steps: int, chars: int) -> Any:  # noqa: ANN401 - any JSON
    """Return what a loop iterates over, after all of its turns have been charged."""
    if isinstance(items, Undefined):
        list(items)  # raises
    if isinstance(items, Mapping):
        items = list(items)
    if not isinstance(items, list | tuple):
        raise PromptError("a loop needs a list or a mapping.")
    budget = _budget_of(context)
    budget.charge_work(steps * len(items))
    budget.charge_output(chars * len(items))
    return items


@pass_context
def _finalize(context: Context, value: Any) -> str:  # noqa: ANN401 - any JSON
    text = to_text(value)
    _budget_of(context).charge_output(len(text))
    return text


class _PlainDataEnvironment(ImmutableSandboxedEnvironment):
    """Environment in which attributes are fields of mappings, and positions are those of lists and texts."""

    def __init__(self) -> None:
        super().__init__(
            undefined=jinja2.StrictUndefined,
            finalize=_finalize,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            autoescape=False,
            cache_size=0,
        )
        self.globals = {}
        self.filters = {**FILTERS, "_weighed": _weighed, "_turns": _turns}
        self.tests = {name: self.tests[name] for name in TESTS}

    def getattr(self, obj: Any, attribute: str) -> Any:  # noqa: ANN401 - any JSON
        """Return a field of a mapping, or of `loop`."""
        if isinstance(obj, LoopContext):
            return getattr(obj, attribute)  # a listed one, see `_check_node`
        return self.getitem(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:  # noqa: ANN401 - any JSON
        """Return an item of a mapping, a list or a text."""
        if isinstance(obj, Undefined):
            str(obj)  # raises
        is_position = isinstance(argument, int) and isinstance(obj, str | list | tuple)
        if (is_position and -len(obj) <= argument < len(obj)) or (
            isinstance(obj, Mapping) and isinstance(argument, str) and argument in obj
        ):
            return obj[argument]
        return self.undefined(obj=obj, name=argument)


class _ChargingTransformer(NodeTransformer):
    """Rewrites a template so that what may be repeated, or takes time by the size of a value, charges the budget."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 - Jinja's name
        steps, chars = _measure([*node.body, *([node.test] if node.test else [])])
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_turns", nodes.Const(steps), nodes.Const(chars))
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:  # noqa: N802 - Jinja's name
        self.generic_visit(node)
        node.expr = _filtered(node.expr, "_weighed")
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, "_weighed")
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:  # noqa: N802 - Jinja's name
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filtered(node.node, "_weighed")
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Filter:  # noqa: N802 - Jinja's name
        self.generic_visit(node)
        if node.node is not None and node.name != "default":
            node.node = _filtered(node.node, "_weighed")
        return _filtered(node, "_weighed")


def _filtered(node: nodes.Node, name: str, *arguments: nodes.Expr) -> nodes.Filter:
    assert isinstance(node, nodes.Expr)
    return nodes.Filter(node, name, list(arguments), [], None, None, lineno=node.lineno)


def _measure(body: list[nodes.Node]) -> tuple[int, int]:
    """Return the number of expressions in the body of a loop, and the length of its fixed text, for one turn.

    What inner loops contain is counted once more by themselves.
    """
    steps, chars, stack = 1, 0, body
    while stack:
        node = stack.pop()
        steps += 1
        if isinstance(node, nodes.TemplateData):
            chars += len(node.data)
        stack.extend(node.iter_child_nodes())
    return steps, chars


_ENVIRONMENT = _PlainDataEnvironment()


def parse_template(source: str) -> nodes.Template:
    """Parse a template and check it.

    Raises:
        PromptError: It is malformed, too large, or has what is not allowed.
    """
    try:
        tree = _ENVIRONMENT.parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise PromptError(f"line {error.lineno}: {error.message}") from error
    except (RecursionError, ValueError, MemoryError) as error:
        raise PromptError("it is nested too deeply, or has too large a number.") from error
    stack: list[tuple[nodes.Node, nodes.Node | None, int, int]] = [(tree, None, 0, 0)]
    count = 0
    while stack:
        node, parent, depth, loops = stack.pop()
        count += 1
        loops += isinstance(node, nodes.For)
        if count > MAX_NODES or depth > MAX_DEPTH or loops > MAX_NESTED_LOOPS:
            raise PromptError(
                f"it has more than {MAX_NODES:,} expressions, {MAX_DEPTH} nested ones, or {MAX_NESTED_LOOPS} nested "
                "loops. Make it simpler."
            )
        _check_node(node, parent)
        stack += [(child, node, depth + 1, loops) for child in node.iter_child_nodes()]
    return tree


def _check_node(node: nodes.Node, parent: nodes.Node | None) -> None:
    """Raise PromptError if a template may not have a node."""
    where = f"line {node.lineno}: "
    if not isinstance(node, _NODES):
        kind = type(node).__name__.lower()
        raise PromptError(
            f"{where}{kind!r} is not allowed. Templates have variables, `if`, `for` and filters, without calls, "
            "arithmetic, assignments and macros."
        )
    match node:
        case nodes.Filter() | nodes.Test():
            known = FILTERS if isinstance(node, nodes.Filter) else TESTS
            if node.name not in known:
                raise PromptError(f"{where}{node.name!r} is unknown. Use {', '.join(known)}.")
            if node.kwargs or node.dyn_args or node.dyn_kwargs or len(node.args) > 1:
                raise PromptError(f"{where}{node.name!r} has at most one argument.")
        case nodes.Name():
            is_loop_field = isinstance(parent, nodes.Getattr) and parent.attr in _LOOP_FIELDS
            if node.name.startswith("_") or (node.name == "loop" and not is_loop_field):
                fields = ", ".join(sorted(_LOOP_FIELDS))
                raise PromptError(
                    f"{where}the name {node.name!r} is reserved. `loop` has the fields {fields}."
                )
        case nodes.Neg() if not isinstance(node.node, nodes.Const):
            raise PromptError(f"{where}arithmetic is not allowed. Compute the value before.")
        case nodes.For(recursive=True):
            raise PromptError(f"{where}recursive loops are not allowed.")
        case nodes.Const() if not _is_plain(node.value):
            raise PromptError(
                f"{where}constants are texts of whole characters, and finite numbers."
            )


def _is_plain(constant: object) -> bool:
    """Whether JSON can contain a constant."""
    if isinstance(constant, str):
        return not any("\ud800" <= char <= "\udfff" for char in constant)
    return not isinstance(constant, float) or math.isfinite(constant)


def compile_template(tree: nodes.Template) -> jinja2.Template:
    """Compile a parsed template, which is changed. Raises PromptError if it cannot be compiled."""
    try:
        charging = _ChargingTransformer().visit(tree)
        return _ENVIRONMENT.from_string(charging.set_environment(_ENVIRONMENT))
    except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError) as error:
        raise PromptError(f"it cannot be compiled: {error}") from error


def render_template(
    template: jinja2.Template, variables: Mapping[str, Any], budget: RenderBudget
) -> str:
    """Render a template.

    Raises:
        PromptError: A variable is missing or has an unsuitable value, or the budget is exhausted.
    """
    context = template.new_context({**variables, _BUDGET: budget})
    try:
        return "".join(template.root_render_func(context))
    except jinja2.TemplateError as error:
        raise PromptError(f"{error.message}. Add it to the variables.") from error
    except PromptError:
        raise
    except (TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise PromptError(f"a value does not fit: {error}.") from error
