"""`hybridflow data check`: problems are reported, not raised; a file needs neither tokenizer nor configuration."""

import json
import subprocess
import sys

from engine.data.check import DataCheck, check_file
from engine.data.prepare import examine
from tests.helpers.tokenizers import char_tokenizer


def test_a_file_alone(raw):
    path = raw("rows.jsonl", b'\xef\xbb\xbf{"prompt":"a","answer":4}\r\n\r\n{"prompt":"A","answer":"4"}\r\n')
    check = check_file(path)
    assert check.ok
    content = json.loads(json.dumps(check.to_json()))
    assert content["columns"] == {"prompt": "string", "answer": "string | number"}
    assert content["duplicates"] == 1
    assert content["prompt_tokens"] == {"min": None, "p50": None, "p95": None, "max": None}
    (file,) = content["files"]
    expected = {"path": path, "rows": 2, "kept": 2, "dropped": 0, "bad_lines": 0, "problems": []}
    assert {key: file[key] for key in expected} == expected


def test_a_broken_file(raw):
    path = raw("rows.jsonl", b'{"prompt":"a"}\n\n{"prompt": \n[]\n{"prompt":"b","answer":[1]}\n')
    content = check_file(path).to_json()
    assert content["ok"] is False
    assert [problem["line"] for problem in content["files"][0]["problems"]] == [3, 4, 5]
    assert (content["files"][0]["rows"], content["files"][0]["kept"]) == (4, 1)
    assert content["columns"] == {"prompt": "string", "answer": "list | absent"}
    assert content["errors"]


def test_a_file_of_preferences(jsonl):
    assert check_file(jsonl("rows.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "b"}])).ok
    assert not check_file(jsonl("rows.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "a"}])).ok


def test_a_missing_or_empty_file_is_reported(raw):
    assert "no such file" in check_file("missing.jsonl").problems[0].remedy
    assert "no row is left" in check_file(raw("rows.jsonl", b"")).problems[0].remedy


def test_the_data_of_a_configuration(jsonl, config):
    train = jsonl("train.jsonl", [{"prompt": "x" * n, "answer": "1"} for n in range(1, 101)])
    held_out = jsonl("eval.jsonl", [{"prompt": "XX", "answer": "1"}])
    prepared, problems = examine(config(train, eval=held_out), char_tokenizer(), needs_answer=True, seed=0)
    content = DataCheck(prepared.report, problems).to_json()
    assert content["overlap"] == [{"train": f"{train}:2", "eval": f"{held_out}:1"}]
    assert content["prompt_tokens"] == {"min": 2, "p50": 51, "p95": 96, "max": 101}
    assert content["ok"] is False
    assert content["errors"][0]["key"] == "data.eval"
    assert [file["path"] for file in content["files"]] == [train, held_out]


def test_without_a_tokenizer_everything_but_lengths_is_checked(jsonl, config):
    train = jsonl("train.jsonl", [{"prompt": "x" * 900, "answer": "1"}, {"prompt": "y", "answer": [1]}])
    prepared, problems = examine(config(train), None, needs_answer=True, seed=0)
    assert [item.value for item in problems][:1] == [f"{train}, line 2"]
    assert prepared.report.prompt_lengths == []


def test_the_data_layer_imports_none_of_the_large_libraries():
    code = (
        "import sys; import engine.data.check, engine.data.completions, engine.data.promptfile;"
        "print(sorted({'torch', 'transformers', 'datasets', 'pyarrow', 'ray', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
