from __future__ import annotations

import functools
import importlib
import linecache
import pickle
import pkgutil
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path

import cloudpickle
import pytest

from sparkhvd.driver.user_code.importable import importable_by, importable_here, importable_nowhere
from sparkhvd.driver.user_code.pickling import dumps
from sparkhvd.driver.user_code.user_modules import import_graph, sent_by_value, user_module
from sparkhvd.errors import ParamError

PROJECT = {
    "ours/__init__.py": "",
    "ours/deep.py": """
import enum, functools, re, threading
WORD = re.compile("t.")
Number = int | float
LOCK = threading.Lock()
class Mode(enum.Enum):
    TIMES = 1
class Missing:
    pass
MISSING = Missing()
@functools.lru_cache(maxsize=3)
def cached(x):
    return x
""",
    "ours/late.py": """
from . import deep
from .deep import Mode
def is_times(mode):
    return mode is Mode.TIMES and deep.cached(7) == 7 and deep.WORD.match("two") and isinstance(7, deep.Number)
def is_locked():
    return deep.LOCK.locked()
""",
    "ours/model.py": """
from . import deep
from .deep import MISSING, Mode
class Scale:
    factor = 1
    def __init__(self):
        self.mode, self.bias = Mode.TIMES, MISSING
    def __call__(self, x):
        from .late import is_times
        import ours.late
        checks = [is_times(self.mode), ours.late.is_times(self.mode), self.bias is deep.MISSING, self.bias is MISSING,
                  isinstance(self, Scale), self.mode is deep.Mode.TIMES]
        return x * self.factor if all(checks) else checks
def predicted(scale, x):
    return scale(x) if isinstance(scale, Scale) and scale.bias is MISSING else "another class"
""",
}

COUNTER = {
    "ours/counter.py": """
import functools
STEPS, SIZES = 0, {"step": 1}
def count():
    global STEPS
    STEPS += SIZES["step"]
def steps():
    return STEPS
def counted(function):
    @functools.wraps(function)
    def counting():
        global STEPS
        STEPS += 1
        return function()
    return counting
class Reader:
    def __call__(self):
        return STEPS
""",
    "ours/training.py": """
from . import counter
from .counter import Reader, count, counted, steps
@counted
def train():
    count()
    counter.SIZES["step"] = 10
    count()
    counter.STEPS += 100
    import ours.counter
    return ours.counter.STEPS, counter.STEPS, steps(), counter.steps(), Reader()()
def read():
    return counter.STEPS, steps(), counter.count.__globals__ is vars(counter)
""",
}


@pytest.fixture
def training(project, tmp_path):
    """Return a module with functions that change the globals of another module."""
    for name, content in COUNTER.items():
        (tmp_path / name).write_text(content)
    return importlib.import_module("ours.training")


IMPORT_LOCATE = "import sys; from sparkhvd.task.user_code.importable import locate"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Add a user's project to the import path, and return its module with the model."""
    for name, content in PROJECT.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("ours.model")
    for name in [name for name in sys.modules if name.partition(".")[0] in {"ours", "script", "fast"}]:
        del sys.modules[name]


def run_in_new_process(program: str, *contents: bytes, path: Path | None = None) -> str:
    """Load the pickles into the list ``objects`` of a new process, run the code there, and return its output."""
    loading = "import pickle, sys; objects = [pickle.load(sys.stdin.buffer) for _ in range(int(sys.argv[1]))]; "
    command = [sys.executable, "-c", loading + program, str(len(contents))]
    environment = {"PYTHONPATH": ":".join([str(Path(__file__).parents[4]), *([str(path)] if path else [])])}
    completed = subprocess.run(
        command, input=b"".join(contents), capture_output=True, timeout=60, check=False, env=environment, cwd="/"
    )
    assert completed.returncode == 0, completed.stderr.decode()
    return completed.stdout.decode().strip()


def test_code_that_executors_cannot_import_is_sent_and_keeps_its_classes(project):
    content = dumps((project.Scale(), project.predicted), importable_nowhere)
    assert run_in_new_process("print(objects[0][1](objects[0][0], 21))", content) == "21"


def test_functions_of_a_sent_module_change_the_attributes_of_the_module(training):
    content = dumps((training.train, training.read), importable_nowhere)
    program = "train, read = objects[0]; print(train(), read())"
    assert run_in_new_process(program, content) == "(112, 112, 112, 112, 112) (112, 112, True)"


def test_a_rank_sends_code_that_uses_a_sent_module_to_other_ranks_and_to_the_driver(project, tmp_path):
    code = """
    from ours import deep
    def create():
        class Words:
            def first(self):
                return deep.WORD.match("two").group(), deep
        return Words()
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(code))
    script = importlib.import_module("script")
    content = dumps(script.create, importable_nowhere)
    pickling = "from sparkhvd._util.class_pickling import PeerPickler, dumps; "
    returned = bytes.fromhex(run_in_new_process(f"{pickling}print(dumps(objects[0](), PeerPickler).hex())", content))
    program = "word, module = objects[1].first(); print(word, module is objects[0].__globals__['deep'])"
    assert run_in_new_process(program, content, returned) == "tw True"
    assert pickle.loads(returned).first() == ("tw", importlib.import_module("ours.deep"))


def test_a_later_pickle_keeps_the_globals_that_code_of_an_earlier_pickle_has_changed(training):
    contents = [dumps(function, importable_nowhere) for function in (training.train, training.read)]
    assert run_in_new_process("print(objects[0](), objects[1]())", *contents) == (
        "(112, 112, 112, 112, 112) (112, 112, True)"
    )


def test_a_later_pickle_has_the_globals_that_the_driver_has_changed_and_an_earlier_one_keeps_its_own(training):
    contents = [dumps(training.read, importable_nowhere)]
    training.counter.STEPS = 5
    contents.append(dumps(training.read, importable_nowhere))
    training.counter.SIZES["step"] = 3
    contents.append(dumps(training.train, importable_nowhere))
    program = "print(objects[0](), objects[1](), objects[2]()[0], objects[1]()[0], objects[0]()[0])"
    assert run_in_new_process(program, *contents) == "(0, 0, True) (5, 5, True) 119 5 0"


def test_a_global_that_pickles_differently_each_time_can_be_sent(training):
    class Changing:
        def __reduce__(self):
            return uuid.UUID, (uuid.uuid4().hex,)

    training.counter.STEPS = Changing()
    contents = [dumps(training.read, importable_nowhere) for _ in range(2)]
    program = "values = [function()[0] for function in objects]; print(len(set(values)), type(values[0]).__name__)"
    assert run_in_new_process(program, *contents) == "2 UUID"


def test_a_module_that_uses_a_library_function_that_holds_weak_references_can_be_sent(training):
    training.counter.STEPS = pkgutil.iter_importer_modules  # of functools.singledispatch
    content = dumps(training.read, importable_nowhere)
    assert run_in_new_process("print(objects[0]()[0].__name__)", content) == "iter_importer_modules"


def test_a_function_within_a_function_of_an_importable_module_does_not_import_the_module(training, tmp_path):
    namespace = {"__name__": "__main__", "counted": training.counted}
    exec("@counted\ndef train():\n    import sys\n    return 'ours.counter' in sys.modules", namespace)
    content = dumps(namespace["train"], importable_here)
    assert run_in_new_process("print(objects[0]())", content, path=tmp_path) == "False"


def test_loading_a_function_where_it_is_defined_keeps_the_changed_globals(training):
    content = dumps(training.train, importable_nowhere)
    training.counter.STEPS = 1000
    assert cloudpickle.loads(content)()[0] == 1112
    assert training.counter.STEPS == 1112


def test_a_lock_is_refused_before_it_is_sent(project):
    late = importlib.import_module("ours.late")
    with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock' object"):
        dumps(late.is_locked, importable_nowhere)


def test_pickles_of_one_process_share_their_classes(project):
    model, function = dumps(project.Scale(), importable_nowhere), dumps(project.predicted, importable_nowhere)
    assert run_in_new_process("print(objects[1](objects[0], 21))", model, function) == "21"


def test_code_that_was_sent_can_be_sent_again(project):
    imports = "from sparkhvd.driver.user_code.pickling import dumps"
    dump_object = f"{imports}; sys.stdout.write(dumps(objects[0]).hex()); sys.stdout.flush()"
    model = bytes.fromhex(run_in_new_process(dump_object, dumps(project.Scale(), importable_nowhere)))
    assert (
        run_in_new_process("print(objects[1](objects[0], 21))", model, dumps(project.predicted, importable_nowhere))
        == "21"
    )
    assert isinstance(cloudpickle.loads(model), project.Scale), "the driver gets its own class back"


def test_pickles_of_two_processes_with_the_same_code_share_their_classes(project, tmp_path):
    other = (
        "from ours.model import Scale; from sparkhvd.driver.user_code.pickling import dumps; "
        "from sparkhvd.driver.user_code.importable import importable_nowhere; "
        "sys.stdout.write(dumps(Scale(), importable_nowhere).hex())"
    )
    model = bytes.fromhex(run_in_new_process(other, path=tmp_path))
    function = dumps(project.predicted, importable_nowhere)
    assert run_in_new_process("print(objects[1](objects[0], 21))", model, function) == "21"
    assert cloudpickle.loads(function)(cloudpickle.loads(model), 21) == 21, "the pickles also match in this process"


def test_code_that_executors_can_import_is_sent_by_name(project, tmp_path):
    content = dumps((project.Scale(), project.predicted), importable_here)
    assert len(content) < 400
    assert run_in_new_process("print(objects[0][1](objects[0][0], 21))", content, path=tmp_path) == "21"


def test_a_class_keeps_the_attributes_that_the_receiving_process_has_changed(project):
    namespace = {"__name__": "__main__"}
    exec(
        "class Settings:\n    rate, sizes = 1, [1]\n    def read(self):\n        return self.rate, self.sizes",
        namespace,
    )
    kind = namespace["Settings"]
    contents = [dumps(kind, importable_nowhere)]
    contents.append(dumps(contents[0]))
    kind.rate = 7
    contents.append(dumps(dumps(kind, importable_nowhere)))
    program = """
from sparkhvd._util.class_pickling import PeerPickler, dumps
kind, again, changed = objects
kind.rate, of_peer = 5, dumps(kind, PeerPickler)
kind.rate = 6
kind.sizes.append(2)
for content in (of_peer, again, changed):
    print(pickle.loads(content) is kind, *kind().read(), end="; ")
"""
    assert run_in_new_process(program, *contents) == "True 6 [1, 2]; True 6 [1, 2]; True 7 [1, 2];"


def test_a_class_keeps_objects_and_methods_that_the_receiving_process_has_changed(project):
    namespace = {"__name__": "__main__"}
    exec(
        """
import collections, decimal
RATE = 1
def plain(): return "plain"
class Settings:
    seen, hooks, scale = collections.Counter(a=1), {"plain": plain}, decimal.Decimal(1)
    def read(self): return self.seen["a"], list(self.hooks), int(self.scale), RATE
    def step(self): return "step"
""",
        namespace,
    )
    kind = namespace["Settings"]
    contents = [dumps(kind, importable_nowhere)]
    namespace["RATE"] = 2
    contents.append(dumps(dumps(kind, importable_nowhere)))
    kind.scale = namespace["decimal"].Decimal(3)
    contents.append(dumps(dumps(kind, importable_nowhere)))
    program = """
kind, *later = objects
kind.seen["a"] = 5
kind.hooks["of_rank"] = print
kind.scale = 2
kind.step = lambda self: "step of rank"
for content in later:
    print(pickle.loads(content) is kind, *kind().read(), kind().step(), end="; ")
"""
    hooks = "['plain', 'of_rank']"
    assert run_in_new_process(program, *contents) == (
        f"True 5 {hooks} 2 2 step of rank; True 5 {hooks} 3 2 step of rank;"
    )


def test_loading_a_class_where_it_is_defined_returns_the_original_class(project):
    method = project.Scale.__call__
    copied = cloudpickle.loads(dumps(project.Scale(), importable_nowhere))
    assert type(copied) is project.Scale
    assert project.Scale.__call__ is method
    project.Scale.factor = 2
    assert run_in_new_process("print(objects[0](21))", dumps(copied, importable_nowhere)) == "42", (
        "the class has its current attributes"
    )


def test_a_module_imported_inside_a_function_is_sent_with_it(project, tmp_path):
    (tmp_path / "script.py").write_text("def late():\n    from ours.late import is_times\n    return is_times(0)")
    script = importlib.import_module("script")
    assert run_in_new_process("print(objects[0]())", dumps(script.late, importable_nowhere)) == "False"


def test_a_module_that_imports_a_sent_module_is_sent_too(project, tmp_path):
    (tmp_path / "script.py").write_text("import ours.model\ndef late():\n    import ours.late")
    importlib.import_module("script")
    graph = import_graph(["script"])
    imports = {name: needed for name, (_, needed) in graph.items()}
    assert set(imports) == {"script", "ours", "ours.model", "ours.deep", "ours.late"}
    assert sent_by_value(imports, set(imports)) == set()
    assert sent_by_value(imports, set(imports) - {"script"}) == {"script"}
    assert sent_by_value(imports, set(imports) - {"ours.deep"}) == {"script", "ours.model", "ours.deep", "ours.late"}


def test_a_module_with_different_content_is_not_importable(project, tmp_path):
    deep = user_module("ours.deep")
    assert importable_here({deep.name: deep.digest}) == {"ours.deep"}
    assert importable_here({deep.name: "other", "ours.nowhere": deep.digest}) == set()


def test_a_module_that_a_compiled_module_creates_is_importable_where_the_compiled_one_is(project, tmp_path):
    from sparkhvd import _core  # noqa: PLC0415 - any compiled module

    target = tmp_path / Path(_core.__file__).name.replace("_core", "fast")
    target.write_bytes(b"compiled")
    created = type(sys)("fast.part")
    created.__file__ = str(target)  # as pybind11 sets it
    sys.modules["fast.part"] = created
    part = user_module("fast.part")
    assert importable_here({part.name: part.digest}) == {"fast.part"}
    target.write_bytes(b"another version")
    assert importable_here({part.name: part.digest}) == set()


def test_a_compiled_module_that_others_cannot_import_is_refused(project, tmp_path):
    import math  # noqa: PLC0415

    from sparkhvd import _core  # noqa: PLC0415 - any compiled module

    target = tmp_path / Path(_core.__file__).name.replace("_core", "fast")
    target.write_bytes(b"")
    fast = type(math)("fast")
    fast.__file__, fast.Kind = str(target), type("Kind", (), {"__module__": "fast"})
    sys.modules["fast"] = fast
    with pytest.raises(ParamError, match=r"The compiled module 'fast' .* cannot be sent .*spark\.archives"):
        dumps(fast.Kind, importable_nowhere)


def test_pickling_restores_cloudpickles_registry_of_modules(project):
    before = cloudpickle.list_registry_pickle_by_value()
    with pytest.raises(TypeError, match="pickle"):
        dumps((project.Scale, sys.stdout), importable_nowhere)
    assert cloudpickle.list_registry_pickle_by_value() == before


def test_code_of_installed_packages_is_sent_only_by_name():
    assert len(dumps([subprocess.run, functools.partial], importable_nowhere)) < 100


def test_a_module_with_its_own_class_is_sent_by_name(monkeypatch):
    installed = type("Settings", (type(sys),), {})("settings_of_a_framework")  # like torch.backends.cudnn
    monkeypatch.setitem(sys.modules, installed.__name__, installed)
    assert cloudpickle.loads(dumps([installed], importable_nowhere)) == [installed]


def test_modules_of_nested_namespace_packages_are_found_without_importing_them(tmp_path):
    folder = tmp_path / "outer" / "inner"
    folder.mkdir(parents=True)
    (folder / "leaf.py").write_text("VALUE = 1\n")
    locate_modules = "print(locate('outer.inner.leaf').origin, locate('outer.inner.no'))"
    command = [sys.executable, "-c", f"{IMPORT_LOCATE}; sys.path.insert(0, {str(tmp_path)!r}); {locate_modules}"]
    completed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert completed.stdout.split() == [str(folder / "leaf.py"), "None"]


NOTEBOOK = """
import functools
from sparkhvd.driver.user_code.importable import importable_nowhere
from sparkhvd.driver.user_code.pickling import dumps
CELL = '''
class Scale:
    def __call__(self, x):
        return x * {factor}
scale = Scale()
@functools.lru_cache
def shift(x):
    return x + {factor}
class Kept:
    @functools.cached_property
    def factor(self):
        return {factor}
def scaled(x):
    return scale(x), shift(x), Kept().factor
'''
for factor in (2, 3):
    exec(CELL.format(factor=factor))
    print(dumps(scaled, importable_nowhere).hex())
"""


def test_a_redefinition_in_a_notebook_replaces_the_loaded_definition_on_workers():
    command = [sys.executable, "-c", NOTEBOOK]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    contents = map(bytes.fromhex, printed.split())
    assert run_in_new_process("print(*(function(10) for function in objects))", *contents) == "(20, 12, 2) (30, 13, 3)"


def test_a_function_with_hundreds_of_names_may_import_modules():
    namespace = {"__name__": "__main__"}
    names = "".join(f"    name_{number}.attribute\n" for number in range(300))
    exec(f"def large():\n    import json\n    return json.dumps(1)\n{names}    import decimal\n", namespace)
    assert cloudpickle.loads(dumps(namespace["large"], importable_nowhere))() == "1"


def test_the_missing_default_of_a_dataclass_keeps_its_identity(project, tmp_path):
    (tmp_path / "script.py").write_text("from dataclasses import *\n@dataclass\nclass Options:\n    size: int\n")
    content = dumps(importlib.import_module("script").Options, importable_nowhere)
    program = "import dataclasses; print(dataclasses.fields(objects[0])[0].default is dataclasses.MISSING)"
    assert run_in_new_process(program, content) == "True"


def test_a_user_module_may_shadow_a_module_of_the_standard_library(tmp_path, monkeypatch):
    assert user_module("cmd") is None
    (tmp_path / "cmd.py").write_text("def doubled(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "cmd", None)
    del sys.modules["cmd"]
    content = dumps(importlib.import_module("cmd").doubled, importable_nowhere)
    assert run_in_new_process("print(objects[0](3))", content) == "6"


def test_a_module_that_changed_in_the_session_is_sent_again():
    importable = {("a", "1"): True, ("b", "1"): False, ("c", "1"): True}
    assert importable_by(importable, {"a": "1", "b": "1", "c": "1"}) == {"a", "c"}
    importable |= {("a", "2"): True, ("b", "2"): True}
    assert importable_by(importable, {"a": "2", "b": "2", "c": "1"}) == {"b", "c"}


_CELL = """password = "swordfish"

def divides(x):
    def inner():
        return x / 0  # in the cell
    return inner()
salt = "pepper"
"""


def test_a_remote_traceback_shows_the_lines_of_a_function_in_a_notebook_cell_and_no_other_lines_are_sent(tmp_path):
    cell = f"<cell of {tmp_path.name}>"
    linecache.cache[cell] = (len(_CELL), None, _CELL.splitlines(keepends=True), cell)
    namespace: dict[str, object] = {"__name__": "__main__"}
    exec(compile(_CELL, cell, "exec"), namespace)
    try:
        content = dumps(namespace["divides"], importable_nowhere)
    finally:
        del linecache.cache[cell]
    assert b"swordfish" not in content
    assert b"pepper" not in content
    (tmp_path / "function").write_bytes(content)
    program = (
        "import cloudpickle, sys, traceback; f = cloudpickle.load(open(sys.argv[1], 'rb'))\n"
        "try: f(1)\nexcept ZeroDivisionError: traceback.print_exc()"
    )
    completed = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "function")], capture_output=True, text=True, check=False
    )
    assert "in divides\n    return inner()\n" in completed.stderr
    assert "return x / 0  # in the cell" in completed.stderr
    assert "line 6, in divides" in completed.stderr
