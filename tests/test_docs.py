"""The documents agree with the repository: links resolve, and named code exists."""

from __future__ import annotations

import ast
import importlib
import re
from functools import reduce
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ARCHITECTURE = (ROOT / "docs/ARCHITECTURE.md").read_text()
PACKAGES = ("models", "attention", "graphs")  # beside asyncllm/, installed inside it
CELL = re.compile(r"`([\w/]+\.py)(?:: ([\w.]+))?`")
DEVICE_ROOMS = ("asyncllm/worker", "asyncllm/kernels", *PACKAGES)
# Calls of torch, or of a tensor, that allocate; and the one of our own that other files call.
ALLOCATORS = {
    f"{prefix}{name}{suffix}"
    for name in ("zeros", "empty", "full", "ones")
    for prefix, suffix in (("", ""), ("new_", ""), ("", "_like"))
} | {"arange", "tensor", "frombuffer", "from_numpy", "create_weights"}
# From a `StepPlan` to a `StepResult`.
STEP_FILES = (
    "step_plan.py",
    "worker/packed_step.py",
    "worker/step_packer.py",
    "worker/slot_sampling.py",
    "worker/model_runner.py",
    "worker/static_inputs.py",
    "worker/device_state.py",
    "worker/staging.py",
    "worker/mixed_step.py",
    "worker/step_sampling.py",
)
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def links(text: str) -> list[str]:
    """Targets of relative links, code left out."""
    targets = re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", text))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(text: str) -> set[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def file_of(path: str) -> Path:
    if path.startswith("tests/"):
        return ROOT / path
    return (ROOT if path.split("/")[0] in PACKAGES else ROOT / "asyncllm") / path


def defines(path: Path, dotted: str) -> bool:
    """Whether the source has this class, function or method at its top level."""
    body: list[ast.stmt] = ast.parse(path.read_text()).body
    for name in dotted.split("."):
        found = [
            node
            for node in body
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name == name
        ]
        if not found:
            return False
        body = found[0].body
    return True


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", ARCHITECTURE, re.DOTALL | re.MULTILINE)
    assert found, title
    return found[1]


def imports_flashinfer(path: Path) -> bool:
    """Directly, or by a name in a string to import."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
        if any(str(name).split(".")[0] == "flashinfer" for name in names):
            return True
    return False


def allocates(value: ast.AST, makers: set[str]) -> bool:
    """Whether it calls what allocates tensors, or names a function or variable that has some."""
    for node in ast.walk(value):
        if isinstance(node, ast.Name) and node.id in makers:
            return True
        if (
            isinstance(node, ast.Attribute)
            and node.attr in ALLOCATORS | makers
            and ast.unparse(node.value) != "np"
        ):
            return True
    return False


def stored_names(statement: ast.Assign | ast.AnnAssign) -> set[str]:
    """Variables, and attributes of self as `self.name`."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    nodes = [node for target in targets for node in ast.walk(target)]
    return {
        ast.unparse(node)
        for node in nodes
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store)
    }


def assigned_tensors(function: ast.FunctionDef, makers: set[str]) -> set[str]:
    """Names in it to which something with a tensor is assigned that was allocated."""
    left = [n for n in ast.walk(function) if isinstance(n, ast.Assign | ast.AnnAssign) and n.value]
    found: set[str] = set()
    while True:  # what is assigned in a block comes later in the walk than its readers
        tensors = [n for n in left if n.value is not None and allocates(n.value, makers | found)]
        if not tensors:
            return found
        left = [statement for statement in left if statement not in tensors]
        found = found.union(*map(stored_names, tensors))


def makers_of(module: ast.Module) -> set[str]:
    """Its functions that return what they, or others of the module, allocate."""
    left = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
    makers: set[str] = set()
    while True:
        new = {function.name for function in left if returns_tensors(function, makers)}
        if not new:
            return makers
        makers |= new
        left = [function for function in left if function.name not in new]


def returns_tensors(function: ast.FunctionDef, makers: set[str]) -> bool:
    returned = [n.value for n in ast.walk(function) if isinstance(n, ast.Return) and n.value]
    names = makers | assigned_tensors(function, makers) if returned else makers
    return any(allocates(value, names) for value in returned)


def tensor_owners(path: Path) -> dict[str, list[str]]:
    """The classes that keep tensors which they allocate -> the attributes."""
    module = ast.parse(path.read_text())
    makers = makers_of(module)
    owners: dict[str, list[str]] = {}
    for owner in (node for node in module.body if isinstance(node, ast.ClassDef)):
        methods = [node for node in owner.body if isinstance(node, ast.FunctionDef)]
        kept = {name for method in methods for name in assigned_tensors(method, makers)}
        attributes = [name for name in kept if name.startswith("self.")]
        cached = [
            method.name
            for method in methods
            if method.name in makers
            and any("cached_property" in ast.unparse(each) for each in method.decorator_list)
        ]
        if attributes or cached:
            owners[owner.name] = sorted(attributes + cached)
    return owners


def cells_of(title: str) -> set[tuple[Path, str]]:
    return {(file_of(path), name) for path, name in CELL.findall(section(title))}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_resolve(document: Path) -> None:
    for link in links(document.read_text()):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text()), link


def test_architecture_names_what_exists() -> None:
    cells = CELL.findall(ARCHITECTURE)
    assert len([name for _, name in cells if name]) > 60
    for path, name in cells:
        assert file_of(path).is_file(), path
        assert not name or defines(file_of(path), name), f"{path}: {name}"


def test_the_life_of_a_request_has_ten_steps_that_can_be_imported() -> None:
    text = section("The life of a request")
    assert re.findall(r"^\| (\d+) \|", text, re.MULTILINE) == [str(i) for i in range(1, 11)]
    for path, name in CELL.findall(text):
        module = importlib.import_module("asyncllm." + path.removesuffix(".py").replace("/", "."))
        assert callable(reduce(getattr, name.split("."), module)), f"{path}: {name}"


def test_one_file_imports_flashinfer() -> None:
    sources = [
        path for package in ("asyncllm", *PACKAGES) for path in (ROOT / package).rglob("*.py")
    ]
    api = ROOT / "attention/flashinfer/api.py"
    assert [path for path in sources if imports_flashinfer(path)] == [api]
    listed = {path for path, _ in cells_of("FlashInfer")}
    assert set((ROOT / "attention/flashinfer").glob("[a-z]*.py")) <= listed


def test_every_class_that_keeps_tensors_is_listed() -> None:
    """A class that its file keeps for itself may be listed by its file."""
    listed = cells_of("Tensors that outlive a step")
    files = {path for path, _ in listed}
    found = 0
    for path in (path for room in DEVICE_ROOMS for path in (ROOT / room).rglob("*.py")):
        for owner, attributes in tensor_owners(path).items():
            found += 1
            is_private = owner.startswith("_") and path in files
            assert is_private or (path, owner) in listed, f"{path}: {owner}: {attributes}"
    assert found > 20


def test_tensors_are_found(tmp_path: Path) -> None:
    """Where a class keeps one: made in place, by a helper, by a variable, at the first use."""
    source = tmp_path / "source.py"
    source.write_text(
        """
def _zeros(n): return torch.zeros(n)
class Helper:
    def __init__(self): self.layers = [_zeros(n) for n in range(3)]
class Variable:
    def __init__(self, x):
        if x:
            made = (x, x.new_empty(3))
        self.pair = made
class Later:
    @cached_property
    def pinned(self): return torch.empty(3, pin_memory=True)
class Thread:
    def __init__(self, thread):
        def allocate(): return torch.empty(3)
        self.future = thread.submit(allocate)
class Host:
    def __init__(self): self.array = np.zeros(3)
class Temporary:
    def run(self): out = torch.empty(3); return out
"""
    )
    assert set(tensor_owners(source)) == {"Helper", "Variable", "Later", "Thread"}


def test_streams_are_listed() -> None:
    listed = {path for path, _ in cells_of("Tensors that outlive a step")}
    for path in (path for room in DEVICE_ROOMS for path in (ROOT / room).rglob("*.py")):
        if "torch.cuda.Stream(" in path.read_text():
            assert path in listed, path


def test_every_class_of_a_step_is_listed_and_counted() -> None:
    text = section("Types to hold when you change the step")
    listed = cells_of("Types to hold when you change the step")
    for path in map(file_of, STEP_FILES):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                assert (path, node.name) in listed, f"{path}: {node.name}"
    always, sometimes = text.split("| feature |")
    for part, numbers in ((always, r"these (\d+) "), (sometimes, r"these (\d+) only")):
        stated = re.search(numbers, always if part is always else text)
        assert stated and len(CELL.findall(part)) == int(stated[1])


def test_docstrings_are_sentences() -> None:
    """A reader knows the subject without the name above: none begins with "Of" or "What"."""
    folders = ("asyncllm", *PACKAGES, "scripts", "tests")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    fragment = re.compile(r'^ *"""(Of|What) ', re.MULTILINE)
    assert len(files) > 500
    assert [file for file in files if fragment.search(file.read_text())] == []
