"""A registered model, loaded by a consumer in a new process without a network, is the model that was trained."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.config import RunConfig
from tasks.mlflow_store import address
from tasks.models import resolve_source
from tasks.refs import opened
from tests.helpers.models import save_model
from tests.unit.tasks.finished import Finished

pytestmark = pytest.mark.usefixtures("fake_session", "mlflow_tables")

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<u>{{ m['content'] }}</u>{% else %}<a>{{ m['content'] }}{{ eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
CHAT = [
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2="},
]
CONSUMER = """
import json, sys
import mlflow

mlflow.set_tracking_uri(sys.argv[1])
pipeline = mlflow.transformers.load_model("models:/sums@champion")
answering = mlflow.pyfunc.load_model("models:/sums@champion")
parts = mlflow.transformers.load_model("models:/sums@champion", return_type="components")  # a pipeline pads on the left
tokenizer, model = parts["tokenizer"], parts["model"]
chat = json.loads(sys.argv[2])
ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
import torch

with torch.no_grad():
    logits = model(torch.tensor([ids])).logits[0, -1].tolist()
print(json.dumps({
    "text": tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False),
    "ids": ids,
    "special": [tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id],
    "side": tokenizer.padding_side,
    "generation": [model.generation_config.eos_token_id, model.generation_config.pad_token_id],
    "logits": logits,
    "tied": model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr(),
    "answers": [answering.predict("1+1="), answering.predict(["1+1=", "2+2="], params={"max_new_tokens": 2})],
    "pipeline": pipeline("1+1=", max_new_tokens=3, do_sample=False)[0]["generated_text"],
}))
"""


def consume(root: str, cwd: Path) -> dict[str, Any]:
    """What a consumer sees who knows only the registry's address and the alias."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT", "MLFLOW"))}
    environment |= {"HF_HUB_OFFLINE": "1", "HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-c", CONSUMER, address(root, None), json.dumps(CHAT)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_a_consumer_gets_the_tokenizer_template_and_weights_that_were_trained(
    registered: Callable[..., RunConfig], tmp_path: Path
):
    base = save_model(tmp_path / "base", template=TEMPLATE, tied=True, seed=3)
    run = Finished(registered(model={"source": str(base)}), "consumed")
    run.register()
    (tmp_path / "elsewhere").mkdir()
    seen = consume(run.ref.root, tmp_path / "elsewhere")
    tokenizer, model = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base)
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    assert seen["text"] == "<u>1+1=</u><a>2</s><u>2+2=</u><a>"
    assert seen["ids"] == ids
    assert seen["special"] == [tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id]
    assert seen["side"] == tokenizer.padding_side
    assert seen["generation"] == [model.generation_config.eos_token_id, model.generation_config.pad_token_id]
    assert seen["tied"]
    torch.testing.assert_close(torch.tensor(seen["logits"]), logits, atol=1e-6, rtol=0)
    (one,), two = seen["answers"]
    assert isinstance(one, str) and one.startswith("1+1=") and len(one) > len("1+1=")
    assert len(two) == 2 and all(isinstance(answer, str) for answer in two)
    assert seen["pipeline"].startswith("1+1=")


def test_a_registered_model_is_a_source_of_later_runs(registered: Callable[..., RunConfig]):
    run = Finished(registered(), "source")
    run.register()
    trained = opened(run.ref).store.folder / run.policy.path / "policy" / "model.safetensors"
    for name in ("models:/sums@champion", "models:/sums/1"):
        folder = resolve_source(name, run.ref.root)
        assert (folder / "model.safetensors").read_bytes() == trained.read_bytes()
        assert AutoTokenizer.from_pretrained(folder).chat_template
