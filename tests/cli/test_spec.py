"""Writing a spec: what `init` leaves runs, `validate` says all, `explain` tells the truth."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from diloco_cli.assemble import SEAMS
from diloco_cli.cli import app as boundary
from diloco_cli.run import scaffold
from diloco_cli.spec.load import load_spec

QUICKSTART = str(Path(__file__).parents[2] / "pipelines" / "quickstart.yaml")


def diloco(*arguments: str) -> object:
    with pytest.raises(SystemExit) as ended:
        boundary.main(list(arguments))
    return ended.value.code


def test_a_good_spec_is_described_on_stdout(capsys):
    assert diloco("validate", QUICKSTART) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("quickstart: ok\n")
    assert "2 (left, right), quorum 1" in printed.out
    assert printed.err == ""


def test_validate_lists_what_is_held_out_and_the_share_of_each_file(tmp_path: Path, capsys):
    for number, size in enumerate((4000, 1000)):
        (tmp_path / f"{number}.txt").write_bytes(b"x" * size)
    files = f"data={{kind: text, files: ['{tmp_path}/*.txt']}}"
    own = "regions.1.data={kind: text, files: [elsewhere/*.txt]}"
    assert diloco("validate", QUICKSTART, "--set", files, "--set", own) == 0
    told = capsys.readouterr().out
    assert "held out  left: the end of 2 files, 250 B, 5.0% of the text" in told
    assert " 80.0%  0.txt" in told and " 20.0%  1.txt" in told
    assert "right: not known here: data.files: no file matches 'elsewhere/*.txt'" in told
    assert diloco("validate", QUICKSTART, "--set", files, "--format", "json") == 0
    (text,) = json.loads(capsys.readouterr().out)["heldout"]
    assert text["regions"] == ["left", "right"]
    assert [file["share"] for file in text["files"]] == [0.8, 0.2]


def test_text_that_is_not_here_is_a_warning_that_says_who_needs_it(capsys):
    own = "regions.1.data={kind: text, files: [nosuch.txt]}"
    assert diloco("validate", QUICKSTART, "--set", own) == 0
    printed = capsys.readouterr()
    assert "warning: --set regions.1.data=" in printed.err and "hint: " in printed.err
    assert "is not on this host, and right will not start without it" in printed.err
    everybody = "data={kind: text, files: [nosuch.txt]}"
    assert diloco("validate", QUICKSTART, "--set", everybody, "--format", "json") == 0
    (warning,) = json.loads(capsys.readouterr().out)["warnings"]
    assert warning["key"] == "data" and "left, right will not start" in warning["message"]


def test_validate_names_every_problem_on_stderr(capsys):
    assert diloco("validate", QUICKSTART, "--set", "sync.quorum=9", "--set", "merge.kind=x") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "--set sync.quorum=9: sync.quorum: is 9 but regions lists 2" in printed.err
    assert "There is no merge rule called 'x'" in printed.err


def test_validate_as_json_is_one_document(capsys):
    assert diloco("validate", QUICKSTART, "--format", "json", "--set", "sync.every=30") == 0
    printed = capsys.readouterr()
    answer = json.loads(printed.out)
    assert (answer["ok"], answer["problems"]) == (True, [])
    assert answer["spec"]["sync"]["every"] == 30
    assert answer["spec"]["inner"]["optimizer"]["beta1"] == 0.9
    assert printed.err == ""


def test_problems_as_json_have_place_message_and_hint(tmp_path: Path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(Path(QUICKSTART).read_text().replace("quorum: 1", "quorm: 1"))
    assert diloco("validate", str(file), "--format", "json") == 2
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ok"], answer["spec"]) == (False, None)
    (problem,) = answer["problems"]
    line = file.read_text().split("quorm")[0].count("\n") + 1
    assert problem == {
        "file": str(file),
        "line": line,
        "column": 3,
        "key": "sync.quorm",
        "message": "no such key",
        "hint": "Did you mean `quorum`?",
    }


def test_a_missing_file_is_a_problem_in_json_too(tmp_path: Path, capsys):
    assert diloco("validate", str(tmp_path / "no.yaml"), "--format", "json") == 2
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert "There is no run spec" in problem["message"]


def test_validate_warns_of_what_hardly_is_meant(capsys):
    change = ("--set", "server.admit=open", "--set", "sync.quorum=3")
    assert diloco("validate", QUICKSTART, *change) == 0
    printed = capsys.readouterr()
    assert "warning: --set sync.quorum=3: sync.quorum: is 3" in printed.err
    assert printed.out.startswith("quickstart: ok\n")
    assert diloco("validate", QUICKSTART, *change, "--format", "json") == 0
    (warning,) = json.loads(capsys.readouterr().out)["warnings"]
    assert warning["key"] == "sync.quorum" and "others have joined" in warning["message"]


def test_explain_lists_every_kind_that_is_registered(capsys):
    assert diloco("explain") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{name}: {', '.join(seam.kinds())}" for name, seam in SEAMS.items()]


def test_explain_tells_name_type_default_and_meaning(capsys):
    assert diloco("explain", "outer") == 0
    said = capsys.readouterr().out
    assert "momentum: number ≥ 0, < 1 (0.9)\n          Share of the last steps'" in said


def test_explain_as_json_says_the_same(capsys):
    assert diloco("explain", "data", "--format", "json") == 0
    kinds = {kind["kind"]: kind for kind in json.loads(capsys.readouterr().out)["data"]}
    files = next(option for option in kinds["text"]["options"] if option["name"] == "files")
    assert (files["type"], files["required"], files["default"]) == ("list of text", True, None)


def test_explain_knows_what_was_meant(capsys):
    assert diloco("explain", "codecs") == 2
    assert "Did you mean `codec`?" in capsys.readouterr().err


@pytest.mark.parametrize("template", scaffold.templates())
def test_init_writes_a_run_that_loads(tmp_path: Path, template: str, capsys):
    folder = tmp_path / "my-run"
    assert diloco("init", str(folder), "--template", template) == 0
    printed = capsys.readouterr()
    spec = load_spec(folder / "run.yaml").spec
    assert spec.name == "my-run"
    assert spec.server.listen == "127.0.0.1:7350"
    names = {f"start-{region.name}.sh" for region in spec.regions}
    written = {path.name for path in folder.iterdir()}
    assert written == {"run.yaml", "start-server.sh", ".gitignore"} | names
    assert {Path(line).name for line in printed.out.split()} == written
    assert "Next:" in printed.err


def test_init_takes_the_regions_it_is_given_and_keeps_the_comments(tmp_path: Path):
    folder = tmp_path / "2024"  # A folder, and a region, whose names look like numbers.
    assert diloco("init", str(folder), "--regions", "paris, 7,tokyo") == 0
    loaded = load_spec(folder / "run.yaml").spec
    assert [region.name for region in loaded.regions] == ["paris", "7", "tokyo"]
    assert loaded.name == "2024"
    assert "# small batches" in (folder / "run.yaml").read_text()
    assert "\n# start: {weights: runs/OLD}" in (folder / "run.yaml").read_text()


def test_a_folder_that_is_no_name_keeps_the_templates_name(tmp_path: Path):
    assert diloco("init", str(tmp_path / "My Run!")) == 0
    assert load_spec(tmp_path / "My Run!" / "run.yaml").spec.name == "quickstart"


def test_init_overwrites_nothing_and_then_writes_nothing(tmp_path: Path, capsys):
    mine = tmp_path / "start-left.sh"
    mine.write_text("mine")
    assert diloco("init", str(tmp_path)) == 2
    assert str(mine) in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["start-left.sh"]
    assert mine.read_text() == "mine"


def test_init_leaves_an_own_gitignore_alone(tmp_path: Path, capsys):
    (tmp_path / ".gitignore").write_text("mine\n")
    assert diloco("init", str(tmp_path)) == 0
    assert (tmp_path / ".gitignore").read_text() == "mine\n"
    assert "runs/ belongs in it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--template", "quikstart"], "Did you mean `quickstart`?"),
        (["--regions", "paris,server"], "cannot be called 'server'"),
        (["--regions", "paris,To kyo"], "'To kyo' cannot be the name of a region"),
        (["--regions", "paris,paris"], "as regions.0.name already is"),
        (["--regions", ""], "'' cannot be the name of a region"),
        (["--regions", "paris,"], "'' cannot be the name of a region"),
        (["--template", "four-regions", "--regions", "paris"], "quorum: is 2 but regions lists 1"),
    ],
)
def test_init_refuses_a_run_that_could_not_work(tmp_path: Path, arguments, said, capsys):
    assert diloco("init", str(tmp_path / "run"), *arguments) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """A new run's folder, and a `diloco` that only says how it was called."""
    assert diloco("init", str(tmp_path / "run"), "--regions", "paris,tokyo") == 0
    fake = tmp_path / "bin" / "diloco"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\necho "$PWD: $*"\n')
    fake.chmod(0o755)
    return tmp_path / "run"


def start(script: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{script.parent.parent / 'bin'}:/usr/bin:/bin"
    return subprocess.run(
        [script, *arguments],
        capture_output=True,
        text=True,
        env={"PATH": path, **environment},
        timeout=30,
    )


def test_scripts_are_sound_and_executable(scripts: Path):
    for script in scripts.glob("*.sh"):
        subprocess.run(["sh", "-n", script], check=True)
        assert os.access(script, os.X_OK)


def test_a_region_script_needs_nothing_but_a_url(scripts: Path):
    wanted = f"{scripts}: work run.yaml --region tokyo --server http://h:1\n"
    script = scripts / "start-tokyo.sh"
    assert start(script, "http://h:1").stdout == wanted
    assert start(script, DILOCO_SERVER="http://h:1").stdout == wanted


def test_scripts_use_certificates_where_there_are_some(scripts: Path):
    script = scripts / "start-tokyo.sh"
    ended = start(script, "https://h:1")
    assert ended.returncode == 2 and "diloco certs issue --region tokyo" in ended.stderr
    (scripts / "certs/regions/tokyo").mkdir(parents=True)
    shown = start(script, "https://h:1").stdout
    assert shown == (
        f"{scripts}: work run.yaml --region tokyo --server https://h:1 "
        "--certs certs/regions/tokyo\n"
    )
    (scripts / "certs/server.pem").touch()
    served = start(scripts / "start-server.sh").stdout
    assert served.endswith(
        "--set server.certs=certs --set server.listen=0.0.0.0:7350 "
        "--set server.admit=credentialed\n"
    )
    assert "certs/" in (scripts / ".gitignore").read_text()


def test_a_region_script_without_a_url_says_so(scripts: Path):
    ended = start(scripts / "start-tokyo.sh")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "hint: " in ended.stderr


def test_the_server_script_passes_options_on(scripts: Path):
    ended = start(scripts / "start-server.sh", "--dir", "elsewhere")
    assert ended.stdout == f"{scripts}: serve run.yaml --dir elsewhere\n"
