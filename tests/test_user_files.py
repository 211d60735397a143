"""user_files.py: what a user's file gets, and when its checksum changes."""

import importlib.util
import zlib
from pathlib import Path

import pytest
from reliability import in_a_folder, run_line, short_run

from errors import UsageError
from user_files import blamed, files_of, load_from_file, source_checksum


def test_a_name_is_found_in_a_file_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def add(a, b):\n    return a + b + offset\n\noffset = 5\n")
    assert load_from_file("mine.py:add")(1, 2) == 8
    assert load_from_file(f"{tmp_path}/mine.py:add")(1, 2) == 8
    with pytest.raises(AttributeError, match="mine.py holds no other"):
        load_from_file("mine.py:other")


@pytest.mark.parametrize("package", ["with_init", "without_init"])
def test_a_file_gets_the_neighbours_of_its_own_folder_as_they_are_now(tmp_path, package):
    """Although both folders have modules of the same names, and after an edit within a second."""
    for name in ("v1", "v2"):
        parts = tmp_path / name / package
        parts.mkdir(parents=True)
        if package == "with_init":
            (parts / "__init__.py").write_text("")
        (parts / "one.py").write_text(f"N = '{name}'")
        (tmp_path / name / "my_blocks.py").write_text(f"from {package}.one import N")
        (tmp_path / name / "m.py").write_text("import my_blocks\ndef f(): return my_blocks.N")
    first = load_from_file(f"{tmp_path}/v1/m.py:f")
    second = load_from_file(f"{tmp_path}/v2/m.py:f")
    assert (first(), second()) == ("v1", "v2")
    (tmp_path / "v1/m.py").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "v1/m.py").read_bytes())
    (tmp_path / "v1" / package / "one.py").write_text("N = 'v3'")
    assert load_from_file(f"{tmp_path}/v1/m.py:f")() == "v3"
    assert (first(), second()) == ("v1", "v2")


def test_an_import_within_a_function_finds_a_neighbour_after_another_file_was_loaded(tmp_path):
    text = "def f():\n    import my_{0}\n    return my_{0}.N"
    for name in ("v1", "v2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"my_{name}.py").write_text(f"N = '{name}'")
        (tmp_path / name / "m.py").write_text(text.format(name))
    functions = [load_from_file(f"{tmp_path}/{name}/m.py:f") for name in ("v1", "v2")]
    assert [f() for f in functions] == ["v1", "v2"]


def test_a_neighbour_that_python_would_not_import_is_named(tmp_path, monkeypatch):
    """The program has imported another module of that name."""
    for name in ("its", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "my_shapes.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "its")
    importlib.import_module("my_shapes")
    (tmp_path / "mine/m.py").write_text("import my_shapes\nf = 1")
    with pytest.raises(ImportError, match="mine/my_shapes.py has the name of .*its/my_shapes.py"):
        load_from_file(f"{tmp_path}/mine/m.py:f")


def test_the_checksum_of_a_users_file_changes_with_its_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("net = 1")
    assert source_checksum("mine.py:net") == zlib.crc32(b"net = 1")
    assert source_checksum("mine.py:other") == source_checksum("mine.py:net")
    (tmp_path / "mine.py").write_text("net = 2")
    assert source_checksum("mine.py:net") == zlib.crc32(b"net = 2")
    for word in ("lenet5", "mine.py", 3, 0.5, None, "a:b"):
        assert source_checksum(word) is None
    with pytest.raises(UsageError, match="^gone.py:net: [^\n]*No such file[^\n]*$"):
        source_checksum("gone.py:net")


def test_the_checksum_covers_imports_within_a_package(tmp_path, monkeypatch):
    """As of `python -m mine.go`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    lines = ["from . import one", "from .two import f", "from mine.three import f"]
    lines.append(f"from {'.' * 99} import f")
    (tmp_path / "mine/go.py").write_text("\n".join(lines))
    (tmp_path / "mine/__init__.py").touch()
    (tmp_path / "mine/go").mkdir()
    (tmp_path / "mine/go/__init__.py").touch()  # Python could take this one for mine/go.py
    monkeypatch.syspath_prepend(tmp_path)
    checksums = [source_checksum("mine/go.py:f")]
    (tmp_path / "mine/go.py").open("a").write("\n# edited")
    for edited in ("none", "one", "two", "three"):
        for name in ("one", "two", "three"):
            (tmp_path / f"mine/{name}.py").write_text(f"f = {int(name == edited)}")
        checksums.append(source_checksum("mine/go.py:f"))
    assert len(set(checksums)) == 5


def test_the_checksum_covers_imports_from_a_folder_above_wherever_python_looks(tmp_path):
    """A package under src/, or a file that puts its parent into sys.path."""
    (tmp_path / "src/mine").mkdir(parents=True)
    (tmp_path / "src/mine/go.py").write_bytes(b"\xef\xbb\xbffrom mine.steps import f")  # with a BOM
    checksums = set()
    for text in ("f = 1", "f = 2"):
        (tmp_path / "src/mine/steps.py").write_text(text)
        checksums.add(source_checksum(f"{tmp_path}/src/mine/go.py:f"))
    assert len(checksums) == 2


def test_the_checksum_covers_a_neighbour_of_the_working_directory(tmp_path, monkeypatch):
    """Python looks there, too. What lies above the file counts only if a name leads there."""
    (tmp_path / "zoo").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "zoo/net.py").write_text("from steps import f")
    checksums = []
    for text in ("f = 1", "f = 2"):
        (tmp_path / "here/steps.py").write_text(text)
        checksums.append(source_checksum("../zoo/net.py:f"))
    (tmp_path / "__init__.py").write_text("unrelated = 1")
    checksums.append(source_checksum("../zoo/net.py:f"))
    assert checksums[0] != checksums[1] == checksums[2]


def test_installed_packages_are_no_files_of_the_users():
    """A model of torchvision imports torch, whose files are thousands."""
    path = Path(importlib.util.find_spec("torchvision").origin).parent / "models/resnet.py"
    found = files_of(path)
    assert path in found and path.parent / "_utils.py" in found
    assert all("torchvision" in file.parts for file in found)


def test_the_checksum_covers_imports_from_folders_without_init(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules" / "inner").mkdir(parents=True)
    (tmp_path / "mine.py").write_text("from rules.inner.one import f")
    checksums = set()
    for text in ("f = 1", "f = 2"):
        (tmp_path / "rules/inner/one.py").write_text(text)
        checksums.add(source_checksum("mine.py:f"))
    assert len(checksums) == 2


@pytest.mark.parametrize(
    ("word", "error", "raised"),
    [
        ("mine.py:f", KeyError("x"), UsageError),
        ("mine.py:f", MemoryError(), MemoryError),
        ("built-in", KeyError("x"), KeyError),
    ],
)
def test_only_a_users_function_is_blamed_and_not_for_the_machine(word, error, raised):
    with pytest.raises(raised), blamed("--score", word, "client 3"):
        raise error


def test_workers_get_our_modules_and_not_those_in_a_users_folder():
    with in_a_folder() as folder:
        (folder / "mine.py").write_text("def f(): pass")
        (folder / "data.py").write_text("")  # a module of ours has this name
        load_from_file(f"{Path(__file__).parent.parent}/errors.py:first_line")
        load_from_file("mine.py:f")
        flags = [*short_run("fedcl_fgn"), "--method=base", "--trials=2", "--jobs=2", "--out=r"]
        status, _, errors = run_line("fedcl_fgn", flags)
    assert status == 0, errors
