"""The documentation is true where a machine can tell: links, commands, flags, defaults, rooms, imports."""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.cli import VERBS, main, parse
from slipstream.config import TrainConfig, UserError, check_ranges
from slipstream.models.families import TABLE

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCE = ROOT / "src" / "slipstream"

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*)")
BLOCK = re.compile(r"^```[a-z]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
FOREIGN = re.compile(
    r"speculative-|model-path$|no-deps$|draft$|fp8$|profile$|only$|nnodes|nproc|rdzv|node-rank"
)
"""Flags of SGLang, pip, PyPI dflash, torchrun and our benchmarks."""


def of_page(path: Path) -> str:
    return str(path.relative_to(ROOT))


# ---- links ----


def slug(heading: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def broken_links(text: str, folder: Path) -> list[str]:
    out = []
    for target in LINK.findall(text):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        path = folder / name if name else None
        if path is not None and not path.exists():
            out.append(target)
        elif anchor:
            page = path.read_text() if path is not None else text
            if anchor not in {slug(h) for h in re.findall(r"^#+ (.+)$", page, re.MULTILINE)}:
                out.append(target)
    return out


@pytest.mark.parametrize("page", PAGES, ids=of_page)
def test_every_relative_link_and_its_anchor_resolves(page):
    assert broken_links(page.read_text(), page.parent) == []


def test_a_broken_link_is_seen():
    text = "# Head `line`\n[a](docs/data.md) [b](no.md) [c](docs/data.md#nowhere) [d](#head-line) [e](#x) [f](http://x)"
    assert broken_links(text, ROOT) == ["no.md", "docs/data.md#nowhere", "#x"]


# ---- commands ----


def commands(text: str) -> Iterator[list[str]]:
    """Words of each command line in code blocks, continued lines joined, comments dropped."""
    for block in BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            line = line.strip().removeprefix("$ ")
            if re.match(r"(slipstream|make|pip|python) ", line) and not line.endswith('"'):
                yield shlex.split(line, comments=True)


def check_command(words: list[str]) -> None:
    """Raises unless the command's verb, flags and values are ones that exist; runs nothing."""
    program, *args = words
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert args[0] in targets, f"make {args[0]}"
    if program == "python" and args[0].endswith(".py"):
        assert (ROOT / args[0]).exists(), args[0]
    if program == "slipstream":
        args = [a for a in args if a != "--debug"]
        assert args[0] in VERBS, f"no verb {args[0]}"
        if "--config" in args and not (ROOT / args[args.index("--config") + 1]).exists():
            at = args.index("--config")  # a run's own recipe: it holds what is required
            args[at : at + 2] = ["--target-model", "t", "--data-dir", "d", "--output-dir", "o"]
        check_ranges(parse(VERBS[args[0]][0], args[0], args[1:]))


COMMANDS = [(of_page(page), words) for page in PAGES for words in commands(page.read_text())]


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=[f"{p}: {' '.join(w)[:50]}" for p, w in COMMANDS])
def test_every_command_line_parses(page, words, monkeypatch):
    monkeypatch.chdir(ROOT)
    check_command(words)


def test_the_commands_of_all_verbs_are_shown_and_found():
    assert {w[1] for _, w in COMMANDS if w[0] == "slipstream"} >= set(VERBS)


@pytest.mark.parametrize(
    "line",
    [
        "slipstream trian --target-model t",
        "slipstream train --target-model t --data-dir d --output-dir o --no-such-flag 1",
        "slipstream train --target-model t --data-dir d --output-dir o --layers many",
        "slipstream train --target-model t --data-dir d",
        "slipstream train --target-model t --data-dir d --output-dir o --layers 0",
        "make nothing",
        "python examples/nothing.py",
    ],
)
def test_a_wrong_command_is_seen(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    found = list(commands(f"```\n$ {line} \\\n\n```\n"))
    assert len(found) == 1
    with pytest.raises((UserError, SystemExit, AssertionError)):
        check_command(found[0])


# ---- flags and defaults ----


def known_flags() -> set[str]:
    fields = {f.name for cls, _ in VERBS.values() for f in dataclasses.fields(cls)}
    plain = {name.replace("_", "-") for name in fields}
    return plain | {f"no-{name}" for name in plain} | {"config", "debug", "help", "version"}


def unknown_flags(text: str) -> set[str]:
    text = BLOCK.sub(lambda m: "" if m[1].startswith(("python -m", "pip")) else m[0], text)
    return {f for f in FLAG.findall(text) if not FOREIGN.match(f)} - known_flags()


@pytest.mark.parametrize("page", PAGES, ids=of_page)
def test_every_flag_that_is_mentioned_exists(page):
    assert unknown_flags(page.read_text()) == set()


def test_an_unknown_flag_is_seen():
    assert unknown_flags(
        "`--max-anchors`, `--no-compile`, `--speculative-algorithm`, `--max-anchor` -- a--b"
    ) == {"max-anchor"}


def test_the_defaults_in_the_table_of_training_are_the_programs():
    text = (ROOT / "docs/training.md").read_text()
    rows = re.findall(r"^\| `--([a-z-]+)` \| (\S+) \|", text, re.MULTILINE)
    defaults = {f.name.replace("_", "-"): str(f.default) for f in dataclasses.fields(TrainConfig)}
    assert len(rows) >= 20
    assert {name: value for name, value in rows if defaults[name] != value} == {}


# ---- rooms ----


def module_name(path: Path) -> str:
    """`training.loop` of src/slipstream/training/loop.py; a room's `__init__` is the room."""
    parts = list(path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str, toplevel: bool = False) -> set[str]:
    """Modules imported, in functions too, our own without the package's name. `toplevel`: at import only."""
    tree = ast.parse(source)
    out = set()
    for node in tree.body if toplevel else ast.walk(tree):
        if isinstance(node, ast.Import):
            out |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the whole path"
            out |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {m.removeprefix("slipstream.") for m in out}


MODULES = {module_name(path): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}


def documented_levels() -> list[tuple[int, str]]:
    """(level, module or room) of the table in docs/architecture.md."""
    text = (ROOT / "docs/architecture.md").read_text()
    rows = re.findall(r"^\| (\d) \| (.+?) \|", text, re.MULTILINE)
    return [(int(level), name) for level, names in rows for name in re.findall(r"`([\w.]+)`", names)]


def level_of(module: str, levels: list[tuple[int, str]]) -> int | None:
    found = [(len(n), level) for level, n in levels if module == n or module.startswith(n + ".")]
    return max(found)[1] if found else None


def upward_imports(modules: dict[str, str]) -> list[str]:
    levels = documented_levels()
    out = []
    for module, source in modules.items():
        for other in sorted(imports_of(source) & set(MODULES)):
            mine, theirs = level_of(module, levels), level_of(other, levels)
            if mine is not None and theirs is not None and theirs > mine:
                out.append(f"{module} → {other}")
    return out


def test_imports_go_down_the_documented_levels_only():
    assert upward_imports(MODULES) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("data.pack", "from slipstream.models.target import Target"),
        ("training.blocks", "def f():\n    from slipstream.training.setup import Run"),
        ("models.drafter", "import slipstream.export.zlab"),
        ("models.target", "from slipstream.training import loop"),
    ],
)
def test_an_import_upward_is_seen(module, line):
    assert len(upward_imports({**MODULES, module: MODULES[module] + "\n" + line})) == 1


def test_every_module_has_a_documented_level():
    packages = {"", "data", "models", "training", "distributed", "export", "decoding", "system"}
    levels = documented_levels()
    assert [m for m in MODULES if m not in packages and level_of(m, levels) is None] == []
    assert [name for _, name in levels if name not in MODULES] == []


def test_no_module_imports_itself_over_others():
    edges = {m: imports_of(source) & set(MODULES) - {m} for m, source in MODULES.items()}
    done: set[str] = set()
    while ready := {m for m, others in edges.items() if m not in done and others <= done}:
        done |= ready
    assert set(edges) - done == set()


@pytest.mark.parametrize("module", ["cli", "config", ""])
def test_help_needs_no_heavy_import(module):
    heavy = {"torch", "transformers", "numpy", "pyarrow", "safetensors", "tyro", "rich"}
    assert not {m.split(".")[0] for m in imports_of(MODULES[module], toplevel=True)} & heavy


def test_yaml_and_environment_variables_are_read_in_config_alone():
    readers = [
        m for m, s in MODULES.items() if "yaml" in imports_of(s) or re.search(r"os\.(environ|getenv)", s)
    ]
    assert readers == ["config"]


def test_names_of_model_families_are_in_their_table_and_the_export_alone():
    strings = {
        m: {
            n.value
            for n in ast.walk(ast.parse(s))
            if isinstance(n, ast.Constant) and isinstance(n.value, str)
        }
        for m, s in MODULES.items()
    }
    assert {m for m, found in strings.items() if found & set(TABLE)} == {"models.families", "export.zlab"}


def test_no_file_of_the_package_is_longer_than_450_lines():
    assert {m: n for m, s in MODULES.items() if (n := s.count("\n")) > 450} == {}


def test_usage_shows_every_verb(capsys):
    assert main(["--help"]) == 0
    shown = re.findall(r"^  ([a-z]+)  ", capsys.readouterr().out, re.MULTILINE)
    assert shown == list(VERBS)


def test_no_page_holds_a_placeholder():
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        assert not re.search(r"\b[A-Z]+_TABLE\b|\bTODO\b|\bTBD\b", page.read_text()), page
