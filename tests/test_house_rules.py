import ast
import functools
import re
import tokenize
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("schemas", "gates", "registry", "workers", "migrations")
FILE_LINES = 600
FUNCTION_LINES = 60

COMMIT = ("registry/db.py", "migrations/env.py")
PHASE = ("registry/evidence.py",)
# The command line knows no settings of the service: it has a person's own address, token and directory.
ENVIRONMENT = (
    *("registry/settings.py", "registry/cli/", "workers/embedded/", "workers/demo/", "workers/launchers/"),
    "workers/engines/",
)
STATEMENTS = ("migrations/versions/",)  # a migration is a list of statements, not a function to follow
STATISTICS = ("gates/stats.py",)
CLIENT = ("registry/cli.py", "registry/cli/", "registry/client.py", "registry/client/")
CLIENT_MAY_IMPORT = ("schemas", "gates", "registry.client", "registry.cli")

# Split, so that this file does not name them itself.
FOREIGN = re.compile("|".join(["/wo" + "rk/", "/fa" + "rm/", "sub" + "agent", "py" + "pi\\.org", "python" + "hosted"]))

Findings = Iterator[tuple[int, str]]


class Source:
    """One Python file, parsed and walked once, with its comments by line for whoever asks."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text
        self.lines = text.splitlines()
        self.all = list(ast.walk(ast.parse(text)))

    @functools.cached_property
    def comments(self) -> dict[int, str]:
        tokens = tokenize.generate_tokens(StringIO(self.text).readline)
        return {t.start[0]: t.string for t in tokens if t.type == tokenize.COMMENT}

    def is_in(self, places: tuple[str, ...]) -> bool:
        return any(self.path == place or (place.endswith("/") and self.path.startswith(place)) for place in places)

    def comment(self, line: int) -> str:
        """The comment on this line, or else the one that has the line before to itself."""
        own = self.comments.get(line, "")
        before = self.comments.get(line - 1, "") if line > 1 else ""
        return own or (before if before and self.lines[line - 2].strip() == before else "")

    def nodes(self, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
        return (node for node in self.all if isinstance(node, kinds))

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        return self.nodes(ast.FunctionDef, ast.AsyncFunctionDef)


def commits(source: Source) -> Findings:
    for call in source.nodes(ast.Call):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "commit" and not source.is_in(COMMIT):
            yield call.lineno, "the edge owns the transaction: commit() belongs to registry/db.py"


def environment(source: Source) -> Findings:
    for node in source.nodes(ast.Attribute, ast.ImportFrom):
        names = {node.attr} if isinstance(node, ast.Attribute) else {alias.name for alias in node.names}
        module = ast.unparse(node.value) if isinstance(node, ast.Attribute) else node.module
        if module == "os" and names & {"environ", "getenv", "environb"} and not source.is_in(ENVIRONMENT):
            yield node.lineno, "the environment is read in registry/settings.py and passed down"


def phase_writes(source: Source) -> Findings:
    if source.is_in(PHASE):
        return
    for node in source.nodes(ast.Attribute, ast.Call):
        written = (
            node.attr == "phase" and isinstance(node.ctx, ast.Store | ast.Del)
            if isinstance(node, ast.Attribute)
            else sets_phase(node)
        )
        if written:
            yield node.lineno, "a phase is the fold of the log: only registry/evidence.py writes it"


def sets_phase(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Attribute) and call.func.attr == "values":
        return any(keyword.arg == "phase" for keyword in call.keywords)
    named = [argument.value for argument in call.args[1:2] if isinstance(argument, ast.Constant)]
    return isinstance(call.func, ast.Name) and call.func.id == "setattr" and named == ["phase"]


def blind_excepts(source: Source) -> Findings:
    for node in source.nodes(ast.ExceptHandler, ast.Call):
        if isinstance(node, ast.ExceptHandler):
            caught = [node.type] if not isinstance(node.type, ast.Tuple) else node.type.elts
        elif ast.unparse(node.func) in {"suppress", "contextlib.suppress"}:
            caught = node.args
        else:
            continue
        blind = any(one is None or ast.unparse(one) in {"Exception", "BaseException"} for one in caught)
        passed_on = (
            isinstance(node, ast.ExceptHandler) and isinstance(node.body[-1], ast.Raise) and not node.body[-1].exc
        )
        if blind and not passed_on and not re.match(r"# edge: \w.{8,}", source.comment(node.lineno)):
            yield (
                node.lineno,
                "catching everything needs `# edge: <the reason>` on its line or the one before",
            )


def inner_imports(source: Source) -> Findings:
    seen = {
        node.lineno
        for function in source.functions()
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    for line in sorted(seen):
        if not source.comment(line):
            yield line, "an import inside a function needs a comment that says why"


def client_imports(source: Source) -> Findings:
    if not source.is_in(CLIENT):
        return
    for node in source.nodes(ast.Import, ast.ImportFrom):
        named = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            named = [f"registry.{name}" for name in named] if node.module == "registry" else [node.module or ""]
        for name in named:
            ours = name.split(".")[0] in PACKAGES
            if ours and not any(name == may or name.startswith(f"{may}.") for may in CLIENT_MAY_IMPORT):
                yield node.lineno, f"the client and the command line import no {name}: they speak HTTP"


def statistics(source: Source) -> Findings:
    for node in source.nodes(ast.Import, ast.ImportFrom):
        named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        if any(name.split(".")[0] == "scipy" for name in named) and not source.is_in(STATISTICS):
            yield node.lineno, "distributions and tests live in gates/stats.py, so that there is one of each"


def long_functions(source: Source) -> Findings:
    if source.is_in(STATEMENTS):
        return
    for function in source.functions():
        start = function.body[0].end_lineno if ast.get_docstring(function) is not None else None
        docstring = start - function.body[0].lineno + 1 if start else 0
        length = function.end_lineno - function.lineno + 1 - docstring
        if length > FUNCTION_LINES:
            yield (
                function.lineno,
                f"{function.name} has {length} lines without its docstring, over {FUNCTION_LINES}",
            )


def long_file(source: Source) -> Findings:
    if len(source.lines) > FILE_LINES:
        yield FILE_LINES, f"{len(source.lines)} lines, over {FILE_LINES}"


Rule = Callable[[Source], Findings]

RULES: tuple[Rule, ...] = (
    commits,
    environment,
    phase_writes,
    blind_excepts,
    inner_imports,
    client_imports,
    statistics,
    long_functions,
    long_file,
)
RULES_FOR_TESTS = (inner_imports, long_file)


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_packages_keep_the_house_rules(rule):
    found = broken(PACKAGES, RULES)[rule]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("rule", RULES_FOR_TESTS, ids=lambda rule: rule.__name__)
def test_the_tests_keep_the_house_rules_that_concern_them(rule):
    found = broken(("tests",), RULES_FOR_TESTS)[rule]
    assert not found, "\n".join(found)


@functools.cache
def broken(folders: tuple[str, ...], rules: tuple[Rule, ...]) -> dict[Rule, list[str]]:
    """What breaks each rule; every file is read and parsed once for all of them."""
    files = python_files(*folders)
    assert files
    found: dict[Rule, list[str]] = {rule: [] for rule in rules}
    for path in files:
        source = Source(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))
        for rule, messages in found.items():
            messages += [f"{source.path}:{line}: {message}" for line, message in rule(source)]
    return found


def test_nothing_names_the_place_where_it_was_written():
    folders = [ROOT / folder for folder in (*PACKAGES, "tests", "deploy", ".ci")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    files += [ROOT / "README.md", ROOT / "Makefile", ROOT / "pyproject.toml"]
    found = []
    for path in files:
        if path.suffix == ".pyc":
            continue
        for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), start=1):
            if FOREIGN.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)


LONG = "def f():\n" + "    x = 1\n" * FUNCTION_LINES
DOCUMENTED = 'def f():\n    """Say.\n' + "\n    More." * 100 + '\n    """\n    return 1\n'


@pytest.mark.parametrize(
    ("rule", "path", "text", "count"),
    [
        (commits, "registry/releases.py", "session.commit()", 1),
        (commits, "registry/db.py", "session.commit()", 0),
        (environment, "registry/api/app.py", "import os\nos.environ['A']\nos.getenv('B')", 2),
        (environment, "gates/load.py", "from os import environ", 1),
        (environment, "workers/launchers/process.py", "import os\nos.environ", 0),
        (phase_writes, "registry/releases.py", "row.phase = 'promoted'", 1),
        (phase_writes, "registry/releases.py", "update(Row).values(phase='promoted')", 1),
        (phase_writes, "registry/releases.py", "setattr(row, 'phase', 'promoted')", 1),
        (phase_writes, "registry/releases.py", "print(row.phase == 'promoted')", 0),
        (phase_writes, "registry/evidence.py", "row.phase = 'promoted'", 0),
        (blind_excepts, "workers/tasks.py", "try:\n    f()\nexcept Exception:\n    pass", 1),
        (blind_excepts, "workers/tasks.py", "try:\n    f()\nexcept:\n    pass", 1),
        (
            blind_excepts,
            "workers/tasks.py",
            "try:\n    f()\nexcept (ValueError, BaseException):\n    pass",
            1,
        ),
        (blind_excepts, "workers/tasks.py", "with suppress(Exception):\n    f()", 1),
        (blind_excepts, "workers/tasks.py", "try:\n    f()\nexcept Exception:  # edge:\n    pass", 1),
        (
            blind_excepts,
            "workers/tasks.py",
            "try:\n    f()\nexcept Exception:  # edge: a task ends here\n    pass",
            0,
        ),
        (blind_excepts, "workers/tasks.py", "try:\n    f()\nexcept BaseException:\n    undo()\n    raise", 0),
        (blind_excepts, "workers/tasks.py", "try:\n    f()\nexcept BaseException:\n    raise Other", 1),
        (blind_excepts, "workers/tasks.py", "try:\n    f()\nexcept ValueError:\n    pass", 0),
        (inner_imports, "gates/load.py", "def f():\n    import scipy", 1),
        (inner_imports, "gates/load.py", "x = 1  # not about it\ndef f():\n    import scipy", 1),
        (inner_imports, "gates/load.py", "def f():\n    # slow to import\n    import scipy", 0),
        (inner_imports, "gates/load.py", "def f():\n    import scipy  # slow to import", 0),
        (client_imports, "registry/client.py", "from registry import db\nimport registry.tables", 2),
        (client_imports, "registry/cli/main.py", "from registry.settings import Settings\nimport workers", 2),
        (
            client_imports,
            "registry/cli.py",
            "from registry.client import Client\nfrom schemas import bundle",
            0,
        ),
        (client_imports, "registry/api/app.py", "from registry import db", 0),
        (statistics, "gates/load.py", "from scipy import special\nimport scipy.stats", 2),
        (statistics, "gates/load.py", "from gates import stats", 0),
        (statistics, "gates/stats.py", "from scipy import special", 0),
        (long_functions, "gates/load.py", LONG, 1),
        (long_functions, "migrations/versions/0001_tables.py", LONG, 0),
        (long_functions, "gates/load.py", DOCUMENTED, 0),
        (long_file, "gates/load.py", "x = 1\n" * (FILE_LINES + 1), 1),
        (long_file, "gates/load.py", "x = 1\n" * FILE_LINES, 0),
    ],
)
def test_a_rule_sees_what_breaks_it_and_nothing_else(rule, path, text, count):
    assert len(list(rule(Source(path, text)))) == count
