"""``triton-tuning run``: a program, and whatever processes it starts, under a policy that it knows nothing of."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tuning.manifest import read_manifest
from tuning.policy import AutotunePolicy
from tuning.program import command_line, environment

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[2]
PINNED = ["--triton-autotune-mode", "pinned", "--triton-autotune-modules", "stub_kernels"]

# What is launched says whether the policy is there: timed, the second candidate wins; pinned, the first is cheapest.
LAUNCH = """
    import json, os, sys
    from stub_kernels import Bench, FakeTensor, StubKernel, autotuner, configs, launch

    def launched(n=1):
        stub = StubKernel()
        tuner = autotuner(configs(16, 32), stub=stub, bench=Bench({16: 2.0, 32: 1.0}, stub))
        launch(tuner, FakeTensor(), FakeTensor(), n, flag=True)
        return int(dict(stub.launches[-1].kwargs)["BLOCK"])
"""


def script(folder: Path, body: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(LAUNCH) + textwrap.dedent(body))
    return path


def variables(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    path = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, path)), **more}


def run(
    *argv: Any, flags: list[str] = PINNED, cwd: Path | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tuning", "run", *flags, *map(str, argv)],
        env=variables(**more),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def printed(result: subprocess.CompletedProcess[str]) -> Any:
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.stub
def test_a_script_is_pinned_and_without_it_timed(tmp_path: Path) -> None:
    file = script(tmp_path, "print(launched())")
    assert printed(run("--", file)) == 16
    plain = subprocess.run([sys.executable, file], env=variables(), capture_output=True, text=True, check=True)
    assert plain.stdout == "32\n"


WHAT_IT_SEES = """
import __main__, json, os, sys
state = {
    "argv": sys.argv, "path": sys.path, "name": __name__, "file": globals().get("__file__"),
    "main": getattr(__main__, "__file__", None),
    "package": __package__, "spec": getattr(__spec__, "name", None), "flags": list(sys.flags),
    "heavy": sorted({"torch", "triton", "tuning"} & set(sys.modules)), "finders": len(sys.meta_path),
}
print(json.dumps(state))
"""


@pytest.mark.parametrize("how", ["script", "module", "folder", "stdin"])
def test_the_program_sees_what_it_sees_under_python(tmp_path: Path, how: str) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(WHAT_IT_SEES)
    (tmp_path / "program.py").write_text(WHAT_IT_SEES)
    target = {"script": ["program.py"], "module": ["-m", "program"], "folder": ["package"], "stdin": ["-"]}[how]
    arguments = ["--lr", "1", "-m", "--", "--help"]
    text = WHAT_IT_SEES if how == "stdin" else None
    found = [
        json.loads(
            subprocess.run(
                [sys.executable, *ours, *target, *arguments],
                input=text,
                env=variables(),
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for ours in ([], ["-m", "tuning", "run", *PINNED, *([] if how == "module" else ["--"])])
    ]
    assert found[1].pop("finders") == found[0].pop("finders") + 1
    assert found[1] == found[0]
    assert found[0]["heavy"] == []


@pytest.mark.parametrize(("body", "code"), [("sys.exit(7)", 7), ("raise ValueError", 1), ("os.abort()", -6), ("", 0)])
def test_the_exit_code_is_the_programs(tmp_path: Path, body: str, code: int) -> None:
    assert run("--", script(tmp_path, body)).returncode == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_meets_the_program_itself(tmp_path: Path, number: signal.Signals) -> None:
    body = f"""
        import signal, time
        signal.signal({int(number)}, lambda *_: sys.exit(40 + launched()))
        print(os.getpid(), flush=True)
        time.sleep(60)
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "tuning", "run", *PINNED, "--", script(tmp_path, body)],
        env=variables(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert int(process.stdout.readline()) == process.pid
    process.send_signal(number)
    assert process.wait(60) == 56
    process.stdout.close()


def test_nothing_is_left_behind_even_when_killed(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    body = "print(launched(), flush=True)\nimport time\ntime.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-m", "tuning", "run", *PINNED, "--", script(tmp_path, body)],
        env=variables(TMPDIR=str(files), HOME=str(files), PYTHONDONTWRITEBYTECODE="1"),
        cwd=files,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "16\n"
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    process.stdout.close()
    assert list(files.iterdir()) == []


WORKERS = {
    "spawn": """
        import multiprocessing
        def work(queue):
            queue.put(launched())
        if __name__ == "__main__":
            context = multiprocessing.get_context("{method}")
            queue = context.Queue()
            worker = context.Process(target=work, args=(queue,))
            worker.start()
            print(json.dumps([launched(), queue.get(timeout=60)]))
            worker.join()
    """,
    "subprocess": """
        import subprocess
        if len(sys.argv) > 1:
            print(launched())
        else:
            inner = subprocess.run([sys.executable, __file__, "x"], capture_output=True, text=True, check=True)
            print(json.dumps([launched(), int(inner.stdout)]))
    """,
    "os.fork": """
        read, write = os.pipe()
        first = launched()
        if os.fork() == 0:
            os.write(write, str(launched(2)).encode())
            os._exit(0)
        os.wait()
        print(json.dumps([first, int(os.read(read, 9))]))
    """,
}


@pytest.mark.parametrize("method", ["forkserver", "subprocess", "os.fork"])
def test_workers_are_pinned_too(tmp_path: Path, method: str) -> None:
    body = WORKERS.get(method, WORKERS["spawn"]).replace("{method}", method)
    assert printed(run("--", script(tmp_path, body), PYTHONWARNINGS="ignore")) == [16, 16]


def test_a_process_without_the_environment_is_out_of_reach(tmp_path: Path) -> None:
    """As the documentation says: with ``-E`` Python reads no PYTHONPATH, and so nothing of ours."""
    inner = (
        f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'tests')]!r}; import runpy; runpy.run_path(sys.argv[1])"
    )
    file = script(tmp_path, "print(launched())", "inner.py")
    body = f"import subprocess; subprocess.run([sys.executable, '-E', '-c', {inner!r}, {str(file)!r}], check=True)"
    assert printed(run("--", script(tmp_path, body))) == 32


def test_torchrun_and_a_manifest_of_each_rank(tmp_path: Path) -> None:
    body = """
        import datetime
        import torch.distributed as dist
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
        rank = dist.get_rank()
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, [rank, launched(8 + rank), os.environ["RANK"]])
        if rank == 0:
            print(json.dumps(gathered))
        dist.destroy_process_group()
    """
    file, manifest = script(tmp_path, body), tmp_path / "manifest.json"
    ranks = ["--standalone", "--nproc-per-node", 2, file]
    # The command `torchrun` is this module.
    how = ["-m", "torch.distributed.run", *ranks]
    flags = [*PINNED, "--triton-autotune-manifest-path", str(manifest)]
    result = run(*how, flags=flags, OMP_NUM_THREADS="1")
    assert printed(result) == [[0, 16, "0"], [1, 16, "1"]]
    files = [manifest, tmp_path / "manifest.rank1.json"]
    assert sorted(tmp_path.glob("manifest*")) == sorted(files)
    for rank, path in enumerate(files):
        found = read_manifest(path)
        assert found.mode == "pinned"
        assert [(launch.source, str(rank + 8) in str(launch.key)) for launch in found.choices] == [("cheapest", True)]
        assert found.benchmarks == ()
        assert f"manifest {path}: mode pinned, 1 choices, 1 autotuners launched, 0 candidates timed" in result.stderr


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_each_process_that_launched_leaves_a_manifest(tmp_path: Path, method: str) -> None:
    manifest = tmp_path / "manifest.json"
    body = WORKERS["spawn"].replace("{method}", method).replace("queue.put(launched())", "queue.put(launched(2))")
    if method == "fork":  # what the parent launched before the fork is no launch of the child
        body = body.replace("queue = context", "launched(); queue = context")
    flags = [*PINNED, "--triton-autotune-manifest-path", str(manifest)]
    result = run("--", script(tmp_path, body), flags=flags, PYTHONWARNINGS="ignore")
    assert printed(result) == [16, 16]
    files = sorted(tmp_path.glob("manifest*"))
    assert len(files) == result.stderr.count("triton-tuning: manifest") == 2
    assert manifest in files
    assert any(".pid" in path.name for path in files)


def test_a_program_that_launches_nothing_has_no_manifest_and_it_is_said(tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.json"
    flags = [*PINNED, "--triton-autotune-manifest-path", str(manifest)]
    result = run("--", script(tmp_path, ""), flags=flags)
    assert result.returncode == 0
    nothing = f"no process launched an autotuner under a policy, so there is no manifest {manifest}"
    assert nothing in result.stderr
    assert not manifest.exists()
    # One of an earlier run is not taken for one of this.
    assert run("--", script(tmp_path, "launched()"), flags=flags).returncode == 0
    for old in (manifest, tmp_path / "manifest.rank1.json"):
        old.write_bytes(manifest.read_bytes())
        os.utime(old, (1e9, 1e9))
    assert run("--", script(tmp_path, ""), flags=flags).stderr == f"triton-tuning: {nothing}\n"


def test_paths_are_those_of_the_command_wherever_workers_run(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    file = script(tmp_path, "os.chdir('elsewhere'); launched()")
    flags = ["--triton-autotune-modules=stub_kernels", "--triton-autotune-record-path=journals/run"]
    (tmp_path / "journals").mkdir()
    result = run("--", file, flags=flags, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert [path.name.partition(".")[0] for path in (tmp_path / "journals").iterdir()] == ["run"]


def test_a_sitecustomize_of_the_user_runs_as_ever(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.users_own = __file__\n")
    file = script(
        tmp_path, "import sitecustomize; print(json.dumps([launched(), sys.users_own, sitecustomize.__file__]))"
    )
    path = os.pathsep.join([str(tmp_path), variables()["PYTHONPATH"]])
    own = str(tmp_path / "sitecustomize.py")
    assert printed(run("--", file, PYTHONPATH=path)) == [16, own, own]
    absent = script(tmp_path / "..", "import sitecustomize", name=f"{tmp_path.name}.py")
    plain = subprocess.run([sys.executable, absent], env=variables(), check=False, capture_output=True, text=True)
    assert run("--", absent).returncode == plain.returncode


def test_a_policy_of_the_programs_own_takes_over(tmp_path: Path) -> None:
    body = """
        import tuning
        with tuning.install(tuning.AutotunePolicy(mode="pinned", modules=("stub_kernels",), block_sizes={"BLOCK": 32})):
            inside = launched()
        print(json.dumps([inside, tuning.active_policy() is None]))
    """
    file = script(tmp_path, body)
    text = file.read_text()
    file.write_text(text.replace("import json", "import tuning.installation\nimport json", 1))
    assert printed(run("--", file)) == [32, True]


def test_deterministic_mode_is_on_before_the_program_uses_torch(tmp_path: Path) -> None:
    body = """
        import torch
        states = [torch.are_deterministic_algorithms_enabled(), os.environ["CUBLAS_WORKSPACE_CONFIG"]]
        print(json.dumps([launched(), *states]))
    """
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent("import torch\n" + textwrap.dedent(LAUNCH) + textwrap.dedent(body)))
    flags = ["--deterministic-mode", "--triton-autotune-modules=stub_kernels"]
    assert printed(run("--", file, flags=flags)) == [16, True, ":4096:8"]


@pytest.mark.parametrize("thread", [False, True])
def test_what_cannot_be_installed_ends_the_program_whoever_would_catch_it(tmp_path: Path, thread: bool) -> None:
    body = "open('journals', 'w').close()  # a file where the folder has to be\nimport threading\n"
    body += "threading.Thread(target=lambda: __import__('triton')).start()\n" if thread else ""
    file = tmp_path / "train.py"
    file.write_text(body + "print('began')\ntry:\n    import triton\nexcept:\n    import triton\nprint('went on')\n")
    flags = ["--triton-autotune-modules=x", f"--triton-autotune-record-path={tmp_path}/journals/run"]
    result = run("--", file, flags=flags, cwd=tmp_path)
    assert result.returncode == 1
    assert "went on" not in result.stdout
    assert thread or result.stdout == "began\n"
    assert "triton-tuning: error: " in result.stderr
    assert "Traceback" not in result.stderr


def test_a_package_that_cannot_be_loaded_ends_the_program(tmp_path: Path) -> None:
    body = "sys.modules['msgpack'] = None\ntry:\n    import triton\nexcept ImportError:\n    print('no triton')\n"
    file = tmp_path / "train.py"
    file.write_text("import sys\n" + body)
    result = run("--", file)
    assert (result.returncode, result.stdout) == (1, "")
    assert f"error: the policy cannot be installed by {sys.executable}: ModuleNotFoundError: " in result.stderr


@pytest.mark.parametrize("form", ["module", "package", "folder"])
@pytest.mark.parametrize("first", [True, False])
def test_another_package_named_tuning_stays_the_programs(tmp_path: Path, form: str, first: bool) -> None:
    """Whether it is imported before ours is needed or after; ours has another name then, and so its parts."""
    place = {"module": "tuning.py", "package": "tuning/__init__.py", "folder": "tuning/installation.py"}[form]
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text("RATE = 0.1\n")
    name = "tuning.installation" if form == "folder" else "tuning"
    imports = [f"import {name} as theirs", "import torch, triton"]
    lines = [
        "import json, sys",
        f"sys.path[:] = [entry for entry in sys.path if entry != {str(ROOT)!r} and 'editable' not in entry]",
        "sys.meta_path[:] = [each for each in sys.meta_path if 'ditable' not in repr(each)]",
        *(imports if first else reversed(imports)),
        "from triton.runtime.autotuner import Autotuner",
        "ours = sys.modules['triton_tuning.installation']",
        "stand_in = sys.modules['triton_tuning.determinism'].l2_normalize",
        "mine = sorted(name for name in sys.modules if name.partition('.')[0] == 'tuning')",
        "said = [Autotuner.run.__module__, stand_in.__module__, ours.active_policy().modules]",
        "said += [torch.are_deterministic_algorithms_enabled(), theirs.RATE, mine]",
        "print(json.dumps(said))",
    ]
    (tmp_path / "train.py").write_text("\n".join(lines))
    found = printed(run("--", tmp_path / "train.py", flags=["--deterministic-mode", "--triton-autotune-modules=x"]))
    own = ["triton_tuning.interception", "triton_tuning.determinism.l2norm"]
    assert found == [*own, ["x"], True, 0.1, sorted({"tuning", name})]


def test_what_imports_our_own_modules_first_gets_them_whole(tmp_path: Path) -> None:
    first = "from tuning.program import environment\nfrom tuning.installation import install\n"
    file = script(tmp_path, "print(launched())")
    file.write_text(first + file.read_text())
    assert printed(run("--", file)) == 16


def test_a_run_inside_of_a_run_has_the_policy_of_the_inner(tmp_path: Path) -> None:
    file = script(tmp_path, "import tuning; print(json.dumps([launched(), tuning.active_policy().mode]))")
    inner = [sys.executable, "-m", "tuning", "run", "--triton-autotune-mode=auto", "--"]
    outer = tmp_path / "outer.py"
    outer.write_text(f"import subprocess, sys\nsys.exit(subprocess.run({inner!r} + [{str(file)!r}]).returncode)\n")
    assert printed(run("--", outer)) == [32, "auto"]


def test_a_finder_in_front_of_ours_is_named(tmp_path: Path) -> None:
    finder = """
import sys
from importlib.machinery import PathFinder
class Profiler:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, path)
sys.meta_path.insert(0, Profiler)
"""
    file = script(tmp_path, "print(launched())\nsys.exit(3)")
    file.write_text(finder + file.read_text())
    result = run("--", file)
    assert (result.returncode, result.stdout) == (3, "32\n")
    assert "imported Triton past the finder that installs the policy" in result.stderr
    assert "(found: Profiler)" in result.stderr


def test_kernels_of_a_module_that_is_run_have_its_name(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    body = """
        import tuning
        def k(x, y, n, flag: "constexpr", BLOCK: "constexpr"): pass
        def names():
            launch(autotuner(configs(16, 32), stub=StubKernel(fn=k)), FakeTensor(), FakeTensor(), 4, flag=True)
            return [choice.kernel for choice in tuning.choices()]
        def work(queue):
            queue.put(names())
        if __name__ == "__main__":
            import multiprocessing
            context = multiprocessing.get_context("spawn")
            queue = context.Queue()
            worker = context.Process(target=work, args=(queue,))
            worker.start()
            print(json.dumps([names(), queue.get(timeout=60)]))
            worker.join()
    """
    script(tmp_path / "pkg", body)
    flags = ["--triton-autotune-mode=pinned", "--triton-autotune-modules=pkg"]
    result = run("-m", "pkg.train", flags=flags, cwd=tmp_path, PYTHONWARNINGS="ignore")
    assert printed(result) == [["pkg.train.k"], ["pkg.train.k"]]


OWN_INSTALLS = {
    "other": ("tuning.install(tuning.AutotunePolicy(modules=('stub_kernels',)))", 32, "mode auto", "replaced"),
    "same": ("tuning.install(tuning.AutotunePolicy(mode='pinned', modules=('stub_kernels',)))", 16, "mode pinned", ""),
    "none": ("launched(); tuning.uninstall()", 32, "mode pinned", "taken_out"),
}


@pytest.mark.parametrize("what", list(OWN_INSTALLS))
def test_what_the_program_does_to_the_policy_is_told(tmp_path: Path, what: str) -> None:
    call, block, mode, kind = OWN_INSTALLS[what]
    manifest = tmp_path / "m.json"
    flags = [*PINNED, "--triton-autotune-manifest-path", str(manifest)]
    result = run("--", script(tmp_path, f"import tuning\n{call}\nprint(launched())"), flags=flags)
    assert printed(result) == block
    last = result.stderr.splitlines()[-1]
    assert f"manifest {manifest}: {mode}, 1 choices" in last
    notices = read_manifest(manifest).notices
    assert [found for found, _ in notices] == ([kind] if kind else [])
    if kind:
        assert notices[0][1] in result.stderr
        assert "<Installation mode=pinned mode='pinned', modules=('stub_kernels',)>" in notices[0][1]
        own = "<Installation mode=auto modules=('stub_kernels',)>"
        assert (own in notices[0][1]) == (what == "other")
        assert last.endswith(f"; {notices[0][1].partition(',')[0].partition(':')[0]}")
    else:
        assert last.endswith("timed in scope")


@pytest.mark.parametrize(
    ("argv", "flags", "said", "code"),
    [
        ([], [], "expected a program", 2),
        (["-m"], [], "expected a program", 2),
        (["--", "no_such_file.py"], [], "'no_such_file.py' is neither a file nor a command", 2),
        (["--", "-"], ["--triton-autotune-manifest-path=no/such/m.json"], "lies in no folder that can be written", 2),
        (["--", "-"], ["--triton-autotune-record-path=file/j/r"], "record_path: ", 2),
        (["--", "-"], ["--triton-autotune-table-path=no/such"], "no/such", 1),
        (["--", "./file"], [], "'./file' is no Python file, and not executable", 2),
        (["--", "folder"], [], "'folder' is a folder without __main__.py", 2),
        (["plain.py"], ["--triton-autotune-modules", "kernels"], "--triton-autotune-modules takes every word", 2),
        (["--", "-"], ["--triton-autotune-on-miss=never"], "--triton-autotune-on-miss", 2),
    ],
)
def test_a_wrong_call_starts_nothing(tmp_path: Path, argv: list[str], flags: list[str], said: str, code: int) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("file", "plain.py"):
        (tmp_path / name).write_text("print('started')\n")
    result = run(*argv, flags=flags, cwd=tmp_path)
    assert result.returncode == code
    assert said in result.stderr
    assert result.stdout == ""


def test_the_variables_for_a_worker_that_something_else_starts(tmp_path: Path) -> None:
    policy = AutotunePolicy(mode="pinned", modules=("stub_kernels",))
    env = environment(policy, base=variables())
    again = environment(policy, base=env)
    assert env["PYTHONPATH"] == again["PYTHONPATH"]
    command = command_line(str(script(tmp_path, "print(launched())")))
    assert subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout == "16\n"


@pytest.mark.parametrize(("given", "after"), [("", ""), ("a:", ":a:"), (":", "::"), ("a::b", ":a::b"), (None, "")])
def test_an_empty_entry_of_the_path_stays(given: str | None, after: str) -> None:
    base = {} if given is None else {"PYTHONPATH": given}
    folder = str(ROOT / "tuning" / "_program_start")
    env = environment(AutotunePolicy(), base=base)
    assert env["PYTHONPATH"] == folder + after
    assert environment(AutotunePolicy(), base=env)["PYTHONPATH"] == env["PYTHONPATH"]


def test_what_runs_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text("")
    (tmp_path / "torchrun").mkdir()  # in the current folder, and named like the command
    files = {"bin/torchrun": "#!/bin/sh\n", "launch.sh": "#!/bin/sh\necho $0\n", "train": "#!/usr/bin/env python3\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "train.py").write_text("")
    with zipfile.ZipFile(tmp_path / "archive", "w") as archive:
        archive.writestr("__main__.py", "")
    os.mkfifo(tmp_path / "pipe")
    for python in ("-", "train.py", "./train.py", "train", "folder", "archive", "pipe"):
        command = command_line(python, ["a"])
        assert (command[0], command[-2:]) == (sys.executable, [python, "a"])
    assert command_line("torchrun", ["a"]) == [str(tmp_path / "bin" / "torchrun"), "a"]
    assert command_line("./launch.sh") == command_line("launch.sh") == ["./launch.sh"]
    assert command_line(str(tmp_path / "launch.sh")) == [str(tmp_path / "launch.sh")]


OPTIONS = ["-O", "-B", "-s", "-b", "-u", "-X", "dev", "-X", "utf8=1", "-W", "error::UserWarning"]


def test_the_program_has_the_options_that_python_was_given(tmp_path: Path) -> None:
    file = tmp_path / "flags.py"
    state = "[list(sys.flags), sys._xoptions, sys.warnoptions, sys.stdout.write_through]"
    file.write_text(f"import json, sys\nprint(json.dumps({state}))\n")
    found = [
        subprocess.run(
            [sys.executable, *options, *ours, file],
            env=variables(PYTHONWARNINGS="once"),
            capture_output=True,
            check=True,
        ).stdout
        for ours in ([], ["-m", "tuning", "run", *PINNED, "--"])
        for options in ([], OPTIONS)
    ]
    assert found[:2] == found[2:]
    assert found[0] != found[1]


def test_a_process_that_imports_no_triton_pays_little(tmp_path: Path) -> None:
    """The smallest of several starts, beside that of plain Python."""
    file = tmp_path / "nothing.py"
    file.write_text("")
    took = {}
    for name, env in {"plain": variables(), "ours": environment(AutotunePolicy(), base=variables())}.items():
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            subprocess.run([sys.executable, file], env=env, check=True)
            times.append(time.perf_counter() - begin)
        took[name] = min(times)
    assert took["ours"] < 3 * took["plain"]
