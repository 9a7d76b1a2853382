"""The manifests for Kubernetes are valid and consistent, and their training program runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.scripts import run_in_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
_MANIFESTS = [
    (path.name, manifest)
    for path in sorted(_FOLDER.glob("*.yaml"))
    for manifest in yaml.safe_load_all(path.read_text())
]
_OPERATOR_FILE = "operator.yaml"
_CORE_MANIFESTS = [(file, manifest) for file, manifest in _MANIFESTS if file != _OPERATOR_FILE]


def _manifest(kind: str) -> dict[str, Any]:
    (manifest,) = [manifest for _, manifest in _MANIFESTS if manifest["kind"] == kind]
    return manifest


def _driver() -> dict[str, Any]:
    return _manifest("Job")["spec"]["template"]


def _settings() -> dict[str, str]:
    arguments = _driver()["spec"]["containers"][0]["args"]
    return dict(argument[len("--conf=") :].split("=", 1) for argument in arguments if argument.startswith("--conf="))


@pytest.mark.parametrize(
    ("file", "manifest"), _CORE_MANIFESTS, ids=[f"{file}-{manifest['kind']}" for file, manifest in _CORE_MANIFESTS]
)
@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_a_manifest_follows_the_schema_of_kubernetes(file: str, manifest: dict[str, Any], version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="tools/make-venv renews an older environment")
    if manifest["kind"] == "Pod":  # the template of executors, in which Spark sets the image
        manifest = {**manifest, "spec": {**manifest["spec"]}}
        manifest["spec"]["containers"] = [{**container, "image": "any"} for container in manifest["spec"]["containers"]]
    validate.validate(manifest, version, strict=True)
    with pytest.raises(validate.ValidationError, match="1 is not of type"):
        validate.validate({**manifest, "metadata": {"name": 1}}, version, strict=True)


def test_the_service_selects_the_driver_and_has_the_ports_that_spark_uses() -> None:
    service, settings = _manifest("Service"), _settings()
    assert service["spec"]["selector"].items() <= _driver()["metadata"]["labels"].items()
    assert settings["spark.driver.host"] == service["metadata"]["name"]
    ports = {str(port["port"]) for port in service["spec"]["ports"]}
    assert ports == {settings["spark.driver.port"], settings["spark.driver.blockManager.port"]}
    assert not service["spec"]["selector"].items() <= _manifest("Pod")["metadata"]["labels"].items(), (
        "the service must not select executors"
    )


def test_accounts_claims_volumes_and_images_agree_between_the_manifests() -> None:
    pod, settings = _driver()["spec"], _settings()
    account = _manifest("ServiceAccount")["metadata"]["name"]
    assert pod["serviceAccountName"] == account == _manifest("RoleBinding")["subjects"][0]["name"]
    assert _manifest("RoleBinding")["roleRef"]["name"] == _manifest("Role")["metadata"]["name"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    claim = _manifest("PersistentVolumeClaim")["metadata"]["name"]
    store = "spark.kubernetes.executor.volumes.persistentVolumeClaim.store"
    assert claim == volumes["store"]["persistentVolumeClaim"]["claimName"] == settings[f"{store}.options.claimName"]
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts.keys() == volumes.keys()
    assert mounts["store"] == settings[f"{store}.mount.path"]
    template = Path(settings["spark.kubernetes.executor.podTemplateFile"])
    assert (str(template.parent), (_FOLDER / template.name).is_file()) == (mounts["job"], True)
    assert pod["containers"][0]["image"] == settings["spark.kubernetes.container.image"]


def test_the_local_folders_of_executors_have_the_prefix_that_spark_expects() -> None:
    template = _manifest("Pod")["spec"]
    mounts = {mount["name"]: mount["mountPath"] for mount in template["containers"][0]["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in template["volumes"]}
    assert [name for name in mounts if name.startswith("spark-local-dir-")]


def test_the_environment_has_the_variables_that_the_arguments_use() -> None:
    container = _driver()["spec"]["containers"][0]
    used = set(re.findall(r"\$\((\w+)\)", " ".join(container["args"])))
    assert used == {variable["name"] for variable in container["env"]}


def test_the_operators_manifest_has_only_fields_of_the_operator() -> None:
    models = pytest.importorskip("kubeflow_spark_api.models", reason="tools/make-venv renews an older environment")

    def fields_of_operator(manifest: dict[str, Any]) -> dict[str, Any]:
        read: dict[str, Any] = models.SparkV1beta2SparkApplication.from_dict(manifest).to_dict()
        return read

    application = _manifest("SparkApplication")
    assert fields_of_operator(application) == application
    with_unknown_field = {**application, "spec": {**application["spec"], "restart": "Never"}}
    assert fields_of_operator(with_unknown_field) == application


def test_the_operator_starts_the_same_training_as_the_job() -> None:
    job, settings, spec = _driver()["spec"], _settings(), _manifest("SparkApplication")["spec"]
    driver, executor = spec["driver"], spec["executor"]
    assert spec["image"] == settings["spark.kubernetes.container.image"]
    assert f"apache/spark:{spec['sparkVersion']}-" in (_FOLDER / "Dockerfile").read_text()
    assert spec["mainApplicationFile"] == f"local://{job['containers'][0]['args'][-1]}"
    assert spec["sparkConf"].items() <= settings.items()
    for name, value in executor.items():
        if isinstance(value, (int, str)):
            assert str(value) == settings[f"spark.executor.{name}"]
    template = _manifest("Pod")["spec"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert list(volumes.values()) == [*job["volumes"], *template["volumes"]]
    assert driver["serviceAccount"] == job["serviceAccountName"]
    assert driver["podSecurityContext"] == executor["podSecurityContext"] == job["securityContext"]
    assert driver["volumeMounts"] == job["containers"][0]["volumeMounts"]
    store = next(mount for mount in driver["volumeMounts"] if mount["name"] == "store")
    assert executor["volumeMounts"] == [store, *template["containers"][0]["volumeMounts"]]


@pytest.mark.spark
@pytest.mark.usefixtures("warm_ranks")
def test_the_training_resumes_its_run_when_the_driver_starts_again(spark: SparkSession, tmp_path: Path) -> None:
    for _ in range(2):
        output = run_in_session(_FOLDER / "train.py", ["--store", "store"], tmp_path, spark)
        assert re.search(r"^loss 0\.\d+ after 5 epochs$", output, re.MULTILINE), output
    assert len(list((tmp_path / "store" / "runs").iterdir())) == 1
