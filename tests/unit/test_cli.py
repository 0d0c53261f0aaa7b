"""The command: exit codes, one JSON object as the last line, nothing else on standard output, nothing heavy for nothing."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engine.commands import arguments, running
from engine.commands.outcome import failure
from engine.errors import StoreError
from engine.runs import begin_attempt, create_run, end_attempt, open_run, read_record
from tests.helpers import programs
from tests.helpers.configs import config, write_config, write_rows
from tests.helpers.tokenizers import char_tokenizer, save_tokenizer

HEAVY = ("torch", "ray", "prefect", "mlflow", "transformers", "vllm", "deepspeed", "datasets", "pyarrow", "rich")
RESULT = {
    "status",
    "run_key",
    "run_dir",
    "iterations_planned",
    "iterations_done",
    "iterations_reused",
    "seconds",
    "weights_sha256",
    "metrics",
    "evaluation",
    "gate",
    "model",
    "error",
}
CALL = """
import sys
from engine import cli
from engine.commands import arguments
from engine.commands.outcome import Outcome
"""


def hybridflow(*words: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """The real command in a process of its own."""
    return programs.run("import sys; from engine.cli import main; sys.exit(main(sys.argv[1:]))", *words, cwd=cwd)


def answer(done: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    """The one JSON object on standard output."""
    (line,) = done.stdout.splitlines()
    content: dict[str, Any] = json.loads(line)
    return content


def model_folder(folder: Path) -> Path:
    """A tokenizer without chat template and a model of 64 positions."""
    save_tokenizer(char_tokenizer(), folder)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    return folder


class TestLightness:
    @pytest.mark.parametrize(
        ("words", "code"),
        [
            (["--help"], 0),
            (["run", "--help"], 0),
            (["status", "--json"], 0),
            (["run", "no.yaml"], 2),
            (["run", "bad.yaml"], 2),
        ],
    )
    def test_nothing_heavy_is_loaded_for_help_status_and_configuration_errors(
        self, tmp_path: Path, words: list[str], code: int
    ):
        (tmp_path / "bad.yaml").write_text("name: x\nfoo: 1\n")
        program = (
            "import atexit, sys; from engine.cli import main;"
            f"atexit.register(lambda: print(*[m for m in {HEAVY} if sys.modules.get(m)], file=sys.stderr));"
            "sys.exit(main(sys.argv[1:]))"
        )
        done = programs.run(program, *words, cwd=tmp_path)
        assert done.returncode == code, done.stderr
        assert done.stderr.splitlines()[-1:] in ([""], [])


class TestConfigurationErrors:
    def test_six_kinds_of_faults_are_one_message(self, tmp_path: Path):
        file = write_config(
            tmp_path,
            data={"train": [{"path": "chat.jsonl"}], "eval": [{"path": "missing.jsonl"}], "eval_fraction": 0.01},
            algorithm={"name": "gpro"},
            train={"prompts_per_iteration": 64, "optimiser": "adam"},
            placement={"mode": "standalone", "ranks": 10_000},
        )
        model_folder(tmp_path / "model")
        write_rows(tmp_path / "chat.jsonl", 20, [{"role": "user", "content": "1+1="}])
        done = hybridflow("run", str(file), "--json", cwd=tmp_path)
        assert done.returncode == 2
        result = answer(done)
        assert result.keys() == RESULT
        assert (result["status"], result["error"]["type"]) == ("failed", "ConfigError")
        for shown in (done.stderr, result["error"]["message"]):
            assert f"{tmp_path}/missing.jsonl" in shown
            assert "train.optimiser" in shown
            assert "gpro" in shown and "ppo, grpo, dr_grpo" in shown
            assert "train.prompts_per_iteration = 64" in shown and "20 rows" in shown
            assert "model.chat_template" in shown and f"{tmp_path}/model" in shown
            assert "placement.mode = 'standalone'" in shown and f"{os.cpu_count()} CPUs" in shown
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "runs").exists()

    def test_without_json_standard_output_stays_empty(self, tmp_path: Path):
        done = hybridflow("run", str(write_config(tmp_path)), "--set", "seed=x", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "") and "seed = 'x'" in done.stderr

    def test_verbose_adds_the_traceback(self, tmp_path: Path):
        done = hybridflow("run", str(write_config(tmp_path)), "--set", "seed=x", "--verbose", cwd=tmp_path)
        assert done.returncode == 2 and "Traceback" in done.stderr

    def test_samples_longer_than_the_model_are_found_beside_other_faults(self, tmp_path: Path):
        file = write_config(tmp_path, data={"max_prompt_tokens": 61}, foo=1)
        model_folder(tmp_path / "model")
        done = hybridflow("run", str(file), cwd=tmp_path)
        assert "data.max_prompt_tokens = 61" in done.stderr and "64 positions" in done.stderr


class TestEnds:
    """How commands end, with the command's work replaced by what it might do."""

    def ended(self, work: str, *words: str) -> "subprocess.CompletedProcess[str]":
        program = f"{CALL}\ndef work(given):\n    {work}\narguments.call = work\nsys.exit(cli.main(sys.argv[1:]))"
        return programs.run(program, "doctor", *words)

    @pytest.mark.parametrize(
        ("name", "code"),
        [
            ("ConfigError", 2),
            ("DataError", 2),
            ("DivergedError", 4),
            ("TransientError", 5),
            ("StoreError", 5),
            ("CancelledError", 130),
        ],
    )
    def test_our_errors_end_with_their_code_and_remedy(self, name: str, code: int):
        done = self.ended(f"from engine import errors; raise errors.{name}('It broke.', remedy='Mend it.')", "--json")
        assert done.returncode == code
        assert done.stderr == "error: It broke.\nMend it.\n"
        assert answer(done)["error"] == {"type": name, "message": "It broke.", "remedy": "Mend it."}

    def test_an_unexpected_error_ends_with_5_and_its_type(self):
        done = self.ended("return {}['key']", "--json")
        assert done.returncode == 5 and "error: KeyError: 'key'" in done.stderr
        assert "Traceback" not in done.stderr and "--verbose" in answer(done)["error"]["remedy"]

    def test_only_the_result_is_on_standard_output(self):
        work = "print('library'); import os; os.system('echo child'); return Outcome({'status': 'ok'}, 'text')"
        done = self.ended(work, "--json")
        assert (done.stdout, done.returncode) == ('{"status": "ok"}\n', 0)
        assert "library" in done.stderr and "child" in done.stderr
        assert self.ended(work).stdout == "text\n"

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_ctrl_c_and_sigterm_cancel(self, number: signal.Signals):
        program = (
            f"{CALL}\nimport time\ndef work(given):\n    print('working', file=sys.stderr, flush=True); time.sleep(600)\n"
            "arguments.call = work\nsys.exit(cli.main(['doctor', '--json']))"
        )
        process = programs.start(program)
        assert process.stderr is not None and process.stderr.readline() == "working\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=programs.HANG_S)
        assert process.returncode == 130 and "cancelled" in err
        assert json.loads(out)["status"] == "cancelled"

    def test_a_missing_argument_is_explained(self):
        done = hybridflow("run")
        assert done.returncode == 2 and "CONFIG" in done.stderr


class TestDataCheck:
    def test_a_good_file(self, tmp_path: Path):
        file = write_rows(tmp_path / "rows.jsonl", 5)
        done = hybridflow("data", "check", str(file), "--json")
        report = answer(done)
        assert done.returncode == 0 and report["ok"]
        assert {"files", "columns", "duplicates", "overlap", "prompt_tokens"} <= report.keys()
        assert report["files"][0] | {"fingerprint": ""} == {
            "path": str(file),
            "rows": 5,
            "kept": 5,
            "dropped": 0,
            "bad_lines": 0,
            "problems": [],
            "fingerprint": "",
        }

    def test_a_bad_file_ends_with_2_and_names_the_line(self, tmp_path: Path):
        file = write_rows(tmp_path / "rows.jsonl", 5)
        file.write_text(file.read_text() + "{broken\n")
        done = hybridflow("data", "check", str(file))
        assert done.returncode == 2 and "line 6" in done.stdout

    def test_the_data_of_a_configuration_with_its_tokenizer(self, tmp_path: Path):
        file = write_config(tmp_path)
        model_folder(tmp_path / "model")
        report = answer(hybridflow("data", "check", str(file), "--json"))
        assert report["ok"] and report["prompt_tokens"]["min"] == 5  # <s>0+1=

    def test_prompts_that_are_too_long_end_with_2(self, tmp_path: Path):
        file = write_config(tmp_path)
        model_folder(tmp_path / "model")
        done = hybridflow("data", "check", str(file), "--set", "data.max_prompt_tokens=5", "--json")
        assert done.returncode == 2
        assert any("data.max_prompt_tokens" in item["remedy"] for item in answer(done)["errors"])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with three runs: one of a living process, one of a dead process, one whose record is broken."""
    for name in ("living", "dead", "broken"):
        run = create_run(config(root=str(tmp_path)), name, Path("model"), {})
        begin_attempt(run)
    dead = tmp_path / "dead" / "OWNER"
    dead.write_text(json.dumps(json.loads(dead.read_text()) | {"started": 0.0}))
    (tmp_path / "dead" / ".tmp-data-1234").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    return tmp_path


class TestRecords:
    def test_status_lists_every_run(self, root: Path):
        done = hybridflow("status", "--root", str(root), "--json")
        rows = {row["run_key"]: row for row in answer(done)["runs"]}
        assert {name: row["status"] for name, row in rows.items()} == {
            "living": "running",
            "dead": "lost",
            "broken": "unreadable",
        }
        assert (rows["living"]["iterations_done"], rows["living"]["iterations_planned"]) == (0, 3)
        assert rows["living"]["owner"]["pid"] == os.getpid() and not rows["dead"]["owner"]["alive"]

    def test_status_for_people(self, root: Path):
        table = hybridflow("status", "--root", str(root)).stdout
        assert "living" in table and "0/3" in table and f"process {os.getpid()}" in table and "(dead)" in table
        assert "attempt 1" in hybridflow("status", "living", "--root", str(root)).stdout

    def test_status_tells_what_comes_next_and_why_a_run_broke_off(self, root: Path):
        end_attempt(open_run(str(root), "dead"), "failed", "TransientError: the engine is gone\nand more")
        done = hybridflow("status", "--root", str(root), "--json")
        rows = {row["run_key"]: row for row in answer(done)["runs"]}
        assert rows["living"]["next_step"] == "data" and rows["living"]["attempts_made"] == 1
        assert rows["living"]["error"] is None and rows["dead"]["error"].startswith("TransientError")
        table = hybridflow("status", "--root", str(root)).stdout
        assert "    TransientError: the engine is gone\n" in table and "and more" not in table
        assert (
            "0 steps are reused (none); first step to run: data"
            in hybridflow("status", "dead", "--root", str(root)).stdout
        )

    def test_watching_ends_when_nobody_works_on_a_run(self, root: Path):
        (root / "living" / "OWNER").unlink()
        done = hybridflow("status", "--root", str(root), "--watch", "0.2")
        assert done.returncode == 0 and "living" in done.stdout and "living" not in done.stderr
        assert hybridflow("status", "--watch", "nothing").returncode == 2

    def test_watching_repeats_itself_until_it_is_interrupted(self, root: Path):
        code = "import sys; from engine.cli import main; sys.exit(main(sys.argv[1:]))"
        process = programs.start(code, "status", "--root", str(root), "--watch", "0.2")
        assert process.stderr is not None
        headers = 0
        while headers < 3:
            headers += process.stderr.readline().startswith("run ")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=programs.HANG_S)
        assert process.returncode == 0 and "living" in out

    def test_status_of_no_run(self, root: Path):
        done = hybridflow("status", "nope", "--root", str(root))
        assert done.returncode == 2 and "known: broken, dead, living" in done.stderr
        assert "no runs" in hybridflow("status", "--root", str(root / "nowhere")).stdout

    def test_repair_closes_what_died_and_leaves_the_living_alone(self, root: Path):
        before = (root / "living" / "run.json").read_bytes()
        done = hybridflow("repair", "--root", str(root), "--json")
        rows = {row["run_key"]: row for row in answer(done)["runs"]}
        assert rows["dead"]["repaired"] == "1 attempts closed, 1 drafts removed"
        assert rows["living"]["repaired"] is None and "in use" in rows["living"]["error"]
        assert "does not parse" in rows["broken"]["error"]
        assert read_record(root / "dead")["attempts"][0]["status"] == "lost"
        assert not (root / "dead" / "OWNER").exists() and not (root / "dead" / ".tmp-data-1234").exists()
        assert (root / "living" / "run.json").read_bytes() == before
        assert hybridflow("repair", "--root", str(root)).stdout == "nothing to repair\n"

    def test_resume_of_no_run_lists_the_known_ones(self, root: Path):
        done = hybridflow("resume", "nope", "--root", str(root), "--json")
        assert done.returncode == 2 and "living" in answer(done)["error"]["message"]


class TestArguments:
    def test_set_may_be_repeated_and_take_several(self):
        given = arguments.parser().parse_args(["run", "c.yaml", "--set", "a=1", "b=2", "--set", "c=3"])
        assert given.set == ["a=1", "b=2", "c=3"]

    def test_set_starts_empty_every_time(self):
        arguments.parser().parse_args(["run", "c.yaml", "--set", "a=1"])
        assert arguments.parser().parse_args(["run", "c.yaml"]).set == []

    @pytest.mark.parametrize("command", ["promote", "rollback"])
    def test_moving_an_alias_needs_a_reason(self, command: str, capsys: pytest.CaptureFixture[str]):
        with pytest.raises(SystemExit) as caught:
            arguments.parser().parse_args([command, "m"])
        assert caught.value.code == 2 and "--reason" in capsys.readouterr().err


def test_the_result_for_people_has_everything_that_matters():
    result = {
        "status": "completed",
        "run_key": "sums-1",
        "run_dir": "/runs/sums-1",
        "iterations_done": 5,
        "iterations_reused": 2,
        "seconds": 12.3,
        "evaluation": {
            "held_out": {"score_mean": 0.9, "baseline_score_mean": 0.5, "rows": 8, "iteration": 5},
            "other": {"score_mean": None, "baseline_score_mean": 0.5, "rows": 8, "iteration": 5},
        },
        "gate": {"verdict": "promote", "reasons": ["gain +0.4"]},
        "model": {"name": "sums", "version": 3, "aliases": ["champion"]},
    }
    assert running.describe(result).splitlines() == [
        "sums-1: completed, 5 iterations in 12 s (2 of them were made before)",
        "  held_out: 0.5000 -> 0.9000 on 8 rows",
        "  other: 0.5000 -> unscored on 8 rows",
        "  gate: promote (gain +0.4)",
        "  model: models:/sums/3 (champion)",
        "  folder: /runs/sums-1",
    ]


def test_the_first_error_is_told_not_the_one_of_reporting_it(capsys: pytest.CaptureFixture[str]):
    """On a full disk the orchestrator fails too, while it writes down why the run did."""
    try:
        try:
            raise StoreError("model.safetensors could not be written.", remedy="Make room.")
        except StoreError:
            raise ConnectionError("500 Internal Server Error")  # noqa: B904 - as a library would
    except ConnectionError as error:
        outcome = failure(error, verbose=False)
    assert outcome.exit_code == 5
    assert outcome.content["error"]["type"] == "StoreError"
    assert "Make room." in capsys.readouterr().err


def test_a_cancellation_stays_one_whatever_it_interrupted():
    try:
        try:
            raise StoreError("the disk is full")
        except StoreError:
            raise KeyboardInterrupt  # noqa: B904 - as the operator would
    except KeyboardInterrupt as interrupt:
        outcome = failure(interrupt, verbose=False)
    assert (outcome.exit_code, outcome.content["status"]) == (130, "cancelled")
