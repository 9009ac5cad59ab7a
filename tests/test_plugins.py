"""Plugins: file name = option name."""

import importlib
import sys

import pytest

from servd.base import plugins
from servd.base.errors import ConfigError


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Plugins `plain` and `two_words`, a shared part and one that cannot be imported."""
    folder = tmp_path / "fruit_plugins"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "_base.py").write_text("class Thing: pass\n")
    (folder / "plain.py").write_text("class Thing: pass\n")
    (folder / "two_words.py").write_text(
        "from fruit_plugins._base import Thing\nclass Plum(Thing): pass\nclass Other: pass\n"
    )
    (folder / "broken.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "fruit_plugins"
    for name in [m for m in sys.modules if m.partition(".")[0] == "fruit_plugins"]:
        del sys.modules[name]


def test_names_are_the_files_that_are_no_shared_parts(package):
    assert plugins.names(package) == ("broken", "plain", "two_words")


def test_names_imports_no_plugin(package):
    plugins.names(package)
    plugins.check("--fruit", package, "plain")
    assert f"{package}.plain" not in sys.modules and package not in sys.modules


def test_check_knows_what_load_finds_and_the_other_words(package):
    for name in ("plain", "two-words", "none", "elsewhere:Thing"):
        plugins.check("--fruit", package, name, "none")
    with pytest.raises(
        ConfigError, match="--fruit 'plum' is unknown; there are: none, broken, plain, two_words"
    ):
        plugins.check("--fruit", package, "plum", "none")


@pytest.mark.parametrize(
    ("name", "module"), [("plain", "plain"), ("two-words", "two_words"), ("two_words", "two_words")]
)
def test_load_finds_the_attribute_by_the_name_of_the_file(package, name, module):
    assert plugins.load(package, name, "__name__") == f"{package}.{module}"


@pytest.mark.parametrize("name", ["two_words", "fruit_plugins.two_words:Plum"])
def test_load_class_finds_the_only_subclass_in_the_file(package, name):
    base = importlib.import_module("fruit_plugins._base").Thing
    assert plugins.load_class(package, name, base).__name__ == "Plum"


@pytest.mark.parametrize("name", ["plum", "_base", "../plain", "__init__"])
def test_an_unknown_name_gets_the_list_of_those_that_exist(package, name):
    with pytest.raises(ConfigError, match="broken, plain, two_words"):
        plugins.load(package, name, "Thing")


def test_a_class_outside_the_package_is_named_with_its_module(package):
    assert (
        plugins.load("servd", f"{package}.plain:Thing", "ignored").__module__ == f"{package}.plain"
    )


def test_an_error_inside_a_plugin_is_not_hidden(package):
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        plugins.load(package, "broken", "Thing")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        plugins.load("servd", f"{package}.broken:Thing", "ignored")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "nowhere.to_be:Found",
            "the module nowhere was not found; install it, or put its folder on PYTHONPATH",
        ),
        ("json.nowhere:Found", "the module json.nowhere was not found"),
        ("json:Nowhere", "module json has no 'Nowhere'"),
    ],
)
def test_a_missing_plugin_class_is_a_config_error(name, text):
    with pytest.raises(ConfigError, match=text):
        plugins.load("servd.worker.spec_decode", name, "ignored")
