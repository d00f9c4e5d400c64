"""What the distribution promises about its own files: names, imports, sizes, forbidden calls and pins."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("learner", "rollout", "shared")
MAX_LINES = 400
CPU_PINS, DEV_PINS = ROOT / "requirements" / "cpu.txt", ROOT / "requirements" / "dev.txt"
SHIPPED = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
SCRIPTS = sorted((ROOT / "scripts").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# Calls that run what a file or a model repository says, by dotted name.
FORBIDDEN_CALLS = {"eval", "exec", "pickle.load", "pickle.loads", "cloudpickle.load", "cloudpickle.loads", "torch.load"}
FORBIDDEN_TRUE_ARGUMENTS = {"trust_remote_code"}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(path: Path) -> dict[str, str]:
    """name -> version; any line that is neither a comment nor `name==version` raises."""
    pins: dict[str, str] = {}
    for line in path.read_text().splitlines():
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        found = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9.!+]+)", text)
        if found is None:
            raise ValueError(f"{path.name}: {line!r} is not name==version")
        pins[canonical(found[1])] = found[2]
    return pins


def forbidden_uses(tree: ast.Module) -> Iterator[str]:
    """Forbidden calls in `tree`, also under an import's other name (`from torch import load as l`)."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        first, _, rest = ast.unparse(node.func).partition(".")
        called = f"{names.get(first, first)}.{rest}" if rest else names.get(first, first)
        if called in FORBIDDEN_CALLS:
            yield f"line {node.lineno}: {called}()"
        for keyword in node.keywords:
            is_off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg in FORBIDDEN_TRUE_ARGUMENTS and not is_off:
                yield f"line {node.lineno}: {keyword.arg}={ast.unparse(keyword.value)}"


@pytest.mark.parametrize("package", PACKAGES)
def test_top_level_name_is_ours_alone(package: str) -> None:
    assert set(metadata.packages_distributions().get(package, [])) == {"seqrelay"}
    module = __import__(package)
    assert Path(module.__path__[0]).resolve() == ROOT / package


def test_distribution_ships_exactly_the_three_packages() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    found = {relative(path.parent) for path in SHIPPED if path.name == "__init__.py"}
    assert {name.replace(".", "/") for name in tools["setuptools"]["packages"]} == found


def test_init_files_are_empty() -> None:
    assert [relative(path) for path in SHIPPED if path.name == "__init__.py" and path.read_text().strip()] == []


def test_imports_are_absolute() -> None:
    relative_imports = [
        f"{relative(path)}:{node.lineno}"
        for path in SHIPPED
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]
    assert relative_imports == []


def test_no_module_is_named_after_the_standard_library() -> None:
    assert [relative(path) for path in [*SHIPPED, *SCRIPTS] if path.stem in sys.stdlib_module_names] == []


def test_no_test_package_shadows_a_shipped_one() -> None:
    assert [relative(path) for path in TESTS if path.name == "__init__.py" and path.parent.name in PACKAGES] == []


def test_files_are_short() -> None:
    counts = {relative(path): len(path.read_text().splitlines()) for path in [*SHIPPED, *SCRIPTS, *TESTS]}
    assert {name: lines for name, lines in counts.items() if lines > MAX_LINES} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load('x')",
        "import torch as t\nt.load('x')",
        "from pickle import loads as l\nl(b'')",
        "eval('1')",
        "f(trust_remote_code=True)",
        "f(trust_remote_code=flag)",
    ],
)
def test_forbidden_calls_are_seen(source: str) -> None:
    assert len(list(forbidden_uses(ast.parse(source)))) == 1


def test_allowed_calls_pass() -> None:
    source = "import json\njson.load(f)\nmodel.eval()\nf(trust_remote_code=False)\nast.literal_eval('1')"
    assert list(forbidden_uses(ast.parse(source))) == []


@pytest.mark.parametrize("path", [*SHIPPED, *SCRIPTS], ids=relative)
def test_no_forbidden_call(path: Path) -> None:
    assert list(forbidden_uses(parse(path))) == []


def test_import_contracts_hold() -> None:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_requirements_hold_only_pins() -> None:
    cpu, dev = read_pins(CPU_PINS), read_pins(DEV_PINS)
    assert len(cpu) > 100
    assert cpu.keys() & dev.keys() == set()


def test_requirements_leave_torch_builds_out() -> None:
    pins = read_pins(CPU_PINS) | read_pins(DEV_PINS)
    assert {"torch", "torchvision", "torchaudio", "torchcodec", "setuptools", "pip"} & pins.keys() == set()


@pytest.mark.parametrize(
    "line", ["https://example.org/a.whl", "a @ https://example.org/a.whl", "-i x", "a>=1", "a==1.*"]
)
def test_other_lines_are_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "r.txt").write_text(f"# made\nnumpy==2.0\n{line}\n")
    with pytest.raises(ValueError, match="is not name==version"):
        read_pins(tmp_path / "r.txt")


def test_pins_satisfy_the_project() -> None:
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    makefile = (ROOT / "Makefile").read_text()
    torch = re.search(r"^TORCH := torch==(\S+)$", makefile, re.MULTILINE)
    assert torch is not None
    extras = project["optional-dependencies"]
    runtime = read_pins(CPU_PINS) | {"torch": torch[1]}
    for wanted, pins in (
        ([*project["dependencies"], *extras["cpu"], *extras["models"]], runtime),
        (extras["dev"], runtime | read_pins(DEV_PINS)),
    ):
        for requirement in map(Requirement, wanted):
            pinned = pins.get(canonical(requirement.name))
            assert pinned is not None, f"{requirement} has no pin; run `make lock`"
            assert requirement.specifier.contains(pinned), f"{requirement} is pinned to {pinned}; run `make lock`"


@pytest.mark.parametrize(
    ("group", "value"),
    [("console_scripts", "shared.cli:main"), ("vllm.general_plugins", "rollout.weight_receiver:register")],
)
def test_entry_point_is_installed_and_exists(group: str, value: str) -> None:
    installed = {point.value for point in metadata.entry_points(group=group) if point.name == "seqrelay"}
    assert installed == {value}, "run `make setup`"
    module, _, function = value.partition(":")
    tree = parse(ROOT / f"{module.replace('.', '/')}.py")
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
