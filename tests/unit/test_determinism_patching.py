"""Replacing attributes and putting them back, and the watch on imports that both need."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tuning.determinism.importing import ImportWatch
from tuning.determinism.patching import Patches
from tuning.errors import DeterminismError


class Base:
    def method(self) -> str:
        return "base"


class Child(Base):
    pass


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(name: str, **contents: Any) -> ModuleType:
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return make


def original() -> str:
    return "original"


def replacement() -> str:
    return "replacement"


def test_an_inherited_attribute_is_deleted_on_undo() -> None:
    patches = Patches("this test")
    patches.set(Child, "method", lambda self: "patched")
    assert Child().method() == "patched"
    patches.undo()
    assert Child().method() == "base"
    assert "method" not in vars(Child)


def test_undo_goes_backwards() -> None:
    target = SimpleNamespace(value=1)
    patches = Patches("this test")
    patches.set(target, "value", 2)
    patches.set(target, "value", 3)
    patches.undo()
    assert target.value == 1
    assert len(patches) == 0


def test_a_foreign_patch_is_left_alone_and_named_and_the_rest_is_undone() -> None:
    target = SimpleNamespace(a=1, b=1)
    patches = Patches("the test's patch")
    patches.set(target, "a", 2)
    patches.set(target, "b", 2)
    patches.set(Child, "method", original)
    target.a = "foreign"
    with pytest.raises(DeterminismError) as caught:
        patches.undo()
    assert str(caught.value) == (
        "cannot undo the test's patch: SimpleNamespace.a was replaced by somebody else since: undo that first, then "
        "undo "
        "this again"
    )
    assert (target.a, target.b, "method" in vars(Child)) == ("foreign", 1, False)
    target.a = 2  # the other patch is undone
    patches.undo()
    assert target.a == 1
    patches.undo()  # nothing left


def test_a_place_that_is_original_again_needs_no_undo() -> None:
    target = SimpleNamespace(a=1)
    patches = Patches("this test")
    patches.set(target, "a", 2)
    target.a = 1
    patches.undo()
    assert target.a == 1


def test_places_are_dotted_names(modules: Any) -> None:
    module = modules("patched_module", value=1)
    patches = Patches("this test")
    patches.set(module, "value", 2)
    patches.set(Child, "method", original)
    assert patches.places == ("patched_module.value", f"{__name__}.Child.method")
    patches.undo()


def test_an_object_is_replaced_under_every_name_in_every_module(modules: Any) -> None:
    first, second = modules("holder_one", f=original), modules("holder_two", g=original, h=len)
    patches = Patches("this test")
    count = patches.replace_everywhere(original, replacement)
    assert (first.f, second.g, second.h) == (replacement, replacement, len)
    late = modules("holder_late", f=first.f)  # imported while the patch stands
    patches.undo()
    assert (first.f, second.g, late.f) == (original, original, original)
    assert count >= 2


# -- the watch on imports ----------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = "watched_package"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / name / "decider.py").write_text("def decide():\n    return 'decided'\n")
    (tmp_path / name / "user.py").write_text(f"from {name}.decider import decide\nRESULT = decide()\n")
    (tmp_path / name / "broken.py").write_text("raise OSError('broken')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        del sys.modules[module]


def test_a_module_is_reported_after_its_own_code_and_before_its_importer(package: str) -> None:
    seen: list[str] = []

    def change(module: ModuleType) -> None:
        seen.append(module.__name__)
        module.decide = lambda: "changed"  # type: ignore[attr-defined]

    watch = ImportWatch([f"{package}.decider"], change)
    watch.install()
    watch.install()
    try:
        user = importlib.import_module(f"{package}.user")
    finally:
        watch.remove()
    assert (user.RESULT, seen) == ("changed", [f"{package}.decider"])
    loader = sys.modules[f"{package}.decider"].__loader__
    assert "exec_module" not in vars(loader)
    assert watch not in sys.meta_path


def test_two_watches_see_the_same_module(package: str) -> None:
    seen: list[int] = []
    watches = [ImportWatch([f"{package}.decider"], lambda module, n=n: seen.append(n)) for n in (1, 2)]  # type: ignore[misc]
    for watch in watches:
        watch.install()
    try:
        importlib.import_module(f"{package}.decider")
    finally:
        for watch in watches:
            watch.remove()
    assert sorted(seen) == [1, 2]


def test_an_exception_of_the_callback_fails_the_import(package: str) -> None:
    def refuse(module: ModuleType) -> None:
        raise DeterminismError("refused")

    watch = ImportWatch([f"{package}.decider"], refuse)
    watch.install()
    try:
        with pytest.raises(DeterminismError, match="refused"):
            importlib.import_module(f"{package}.decider")
    finally:
        watch.remove()
    assert f"{package}.decider" not in sys.modules


def test_a_module_that_fails_is_not_reported(package: str) -> None:
    seen: list[ModuleType] = []
    watch = ImportWatch([f"{package}.broken"], seen.append)
    watch.install()
    try:
        with pytest.raises(OSError, match="broken"):
            importlib.import_module(f"{package}.broken")
    finally:
        watch.remove()
    assert seen == []


def test_a_watch_that_was_removed_sees_nothing(package: str) -> None:
    seen: list[ModuleType] = []
    watch = ImportWatch([f"{package}.decider"], seen.append)
    watch.install()
    watch.remove()
    watch.remove()
    importlib.import_module(f"{package}.decider")
    assert seen == []


def test_a_watch_that_is_removed_during_an_import_reports_it_no_more(package: str, tmp_path: Path) -> None:
    seen: list[ModuleType] = []
    watch = ImportWatch([f"{package}.remover"], seen.append)
    sys.modules[package + "_watch"] = watch  # type: ignore[assignment]
    code = f"import sys\nsys.modules['{package}_watch'].remove()\n"
    (tmp_path / package / "remover.py").write_text(code)
    watch.install()
    try:
        importlib.import_module(f"{package}.remover")
    finally:
        watch.remove()
        del sys.modules[package + "_watch"]
    assert seen == []


def test_a_watched_module_that_does_not_exist_is_as_missing_as_ever() -> None:
    watch = ImportWatch(["no_such_module_at_all"], lambda module: None)
    watch.install()
    try:
        with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
            importlib.import_module("no_such_module_at_all")
    finally:
        watch.remove()
