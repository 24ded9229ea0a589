"""The image and the manifests: they build, their schemas hold, and what they name exists.

No cluster is asked and no image is built: schemas, kustomize, and rules that only both together can break.
"""

from __future__ import annotations

import fnmatch
import gzip
import json
import os
import re
import shlex
import tomllib
from decimal import Decimal
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from manifests import (
    K8S,
    OVERLAYS,
    ROOT,
    SWEEPS,
    Manifest,
    build,
    cluster_spec,
    containers,
    named,
    of_kind,
    pod_templates,
    ray_groups,
)
from test_jobs import LAYOUTS

import pipeline.plan
from pipeline.run import RunOptions, open_sweep
from pipeline.spec import SpecError, load_sweep
from workers.description import ModelDescription
from workers.job import ModelSpec

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
DEPLOY = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
EVERY = [K8S / "base", *OVERLAYS, *SWEEPS]
CUSTOM = ("RayCluster", "RayJob")

every_build = pytest.mark.parametrize("folder", EVERY, ids=lambda path: str(path.relative_to(K8S)))
every_sweep = pytest.mark.parametrize("folder", SWEEPS, ids=lambda path: path.name)


# ---- schemas


@every_build
def test_objects_of_kubernetes_own_are_valid(folder: Path) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for one in build(folder):
        if one["kind"] not in CUSTOM:
            validator.validate(one, "1.33", strict=True)  # raises for a kind that it does not know, too


@every_build
def test_pods_of_ray_are_valid(folder: Path) -> None:
    """The resources' own schemas leave pod templates' depths to Kubernetes."""
    validator = pytest.importorskip("kubernetes_validate")
    for where, template in pod_templates(build(folder)):
        meta = {"name": re.sub(r"\W+", "-", where)}
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": meta, "template": template}
        validator.validate(pod, "1.33", strict=True)


def test_a_misspelt_field_deep_in_a_pod_is_found() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    bad = {"spec": {"containers": [{"name": "x", "image": "y", "resources": {"limit": {"cpu": "1"}}}]}}
    pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": bad}
    with pytest.raises(validator.ValidationError, match="limit"):
        validator.validate(pod, "1.33", strict=True)


@every_build
def test_objects_of_ray_are_valid(folder: Path, shared_data: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    checked = 0
    for one in build(folder):
        if one["kind"] in CUSTOM:
            schema = json.loads(
                gzip.decompress((shared_data / "kuberay" / f"{one['kind']}.v1.schema.json.gz").read_bytes())
            )
            jsonschema.validate(one, schema)
            assert one["apiVersion"] == "ray.io/v1"
            checked += 1
    assert checked == 1


# ---- the operator's rules that no schema has


@every_build
def test_the_operators_rules_for_clusters_hold(folder: Path) -> None:
    spec = cluster_spec(build(folder))
    assert spec["authOptions"] == {"mode": "token"}
    grows = spec["enableInTreeAutoscaling"]
    assert grows == ("autoscalerOptions" in spec)
    names = [group["groupName"] for group in spec["workerGroupSpecs"]]
    assert len(set(names)) == len(names)
    for group in spec["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert grows == (group["minReplicas"] < group["maxReplicas"])
        assert "restartPolicy" not in group["template"]["spec"]  # the second autoscaler allows Never alone
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert not gpus(spec["headGroupSpec"])


@every_sweep
def test_the_operators_rules_for_jobs_hold(folder: Path) -> None:
    (job,) = of_kind(build(folder), "RayJob")
    name, spec = job["metadata"]["name"], job["spec"]
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name)
    assert len(name) <= 47
    assert spec["submissionMode"] == "HTTPMode"
    assert spec["shutdownAfterJobFinishes"] is True  # also what lets a queue suspend it
    assert spec["ttlSecondsAfterFinished"] > 0
    assert "deletionStrategy" not in spec
    assert "clusterSelector" not in spec
    assert spec["backoffLimit"] >= 1
    assert 0 < spec["preRunningDeadlineSeconds"] < spec["activeDeadlineSeconds"]
    assert "runtimeEnvYAML" not in spec  # it is shown to everybody who sees the dashboard


def test_a_queued_cluster_and_a_queued_job_name_their_queue() -> None:
    queued = {"kueue.x-k8s.io/queue-name": "kvsweep"}
    assert named(build(K8S / "overlays" / "kueue"), "RayCluster", "kvsweep")["metadata"]["labels"] == queued
    job = named(build(K8S / "sweeps" / "kueue"), "RayJob", "sweep")
    assert (job["metadata"]["labels"], job["spec"]["suspend"]) == (queued, True)


@every_sweep
def test_an_unattended_sweep_gets_the_interactive_cluster(folder: Path) -> None:
    there = build(K8S / "overlays" / folder.name)
    (cluster,) = of_kind(there, "RayCluster")
    objects = build(folder)
    (job,) = of_kind(objects, "RayJob")
    assert job["spec"]["rayClusterSpec"] == cluster["spec"]
    assert not of_kind(objects, "RayCluster")
    rest = [one for one in objects if one["kind"] != "RayJob"]
    assert rest == [one for one in there if one["kind"] != "RayCluster"]


# ---- one version of everything


def test_ray_is_the_same_in_the_project_the_lock_the_image_and_the_manifest() -> None:
    (locked,) = re.findall(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    (asked,) = (one for one in PROJECT["dependencies"] if one.startswith("ray["))
    least, below = re.fullmatch(r"ray\[default\]>=(.+),<(.+)", asked).groups()  # type: ignore[union-attr]
    assert versioned(least) <= versioned(locked) < versioned(below)
    assert f"ARG RAY={locked}\n" in DOCKERFILE
    assert re.search(r"^FROM rayproject/ray:\$\{RAY\}-py311-\$\{DEVICE\} ", DOCKERFILE, re.MULTILINE)
    assert cluster_spec(build(K8S / "base"))["rayVersion"] == locked
    assert ">=3.11" in PROJECT["requires-python"]


def versioned(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def test_the_images_are_of_the_projects_version() -> None:
    built = set(re.findall(r"docker build --tag (\S+)", DOCKERFILE))
    assert built == {f"kvsweep:{PROJECT['version']}{kind}" for kind in ("", "-cpu")} | {
        f"kvsweep-mlflow:{PROJECT['version']}"
    }
    used = {container["image"] for folder in EVERY for _, _, container in containers(build(folder))}
    ours = {image for image in used if "kvsweep" in image}
    assert {image.rpartition("/")[2] for image in ours} == built
    placeless = {
        (folder.name, container["image"])
        for folder in EVERY
        for _, _, container in containers(build(folder))
        if "kvsweep" in container["image"] and "/" not in container["image"]
    }
    assert {folder for folder, _ in placeless} == {"base", "local"}, "elsewhere images come from a registry"
    assert {image for _, image in placeless} == built


@every_build
def test_no_image_is_the_latest(folder: Path) -> None:
    for where, _, container in containers(build(folder)):
        tag = container["image"].rpartition("/")[2].partition(":")[2]
        assert re.search(r"\d", tag), where


def test_the_dockerfile_pins_its_bases_and_drops_root() -> None:
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    assert [stage.split("\n")[0].split(" AS ")[1] for stage in stages] == ["mlflow", "sweep"]
    for stage in stages:
        assert re.search(r"\d+\.\d+|\$\{RAY\}", stage.split()[0])
        users = re.findall(r"^USER (\S+)$", stage, re.MULTILINE)
        assert re.fullmatch(r"[1-9]\d*:\d+", users[-1]), "a number, so that Kubernetes can tell that it is not root"
        assert "--constraint" in stage
    assert not re.search(r"token|password|secret", DOCKERFILE, re.IGNORECASE)
    assert "WORKDIR /app\n" in stages[-1]


def test_an_image_holds_the_code_and_no_more() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    assert lines[0] == "*"
    allowed = {line[1:] for line in lines if line.startswith("!")}
    packages = {pattern.rstrip("*") for pattern in packaged()}
    assert allowed == packages | {"pyproject.toml", "constraints.txt", "README.md", "jobs"}
    assert all((ROOT / name).exists() for name in allowed)


def packaged() -> list[str]:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    return list(tool["setuptools"]["packages"]["find"]["include"])


# ---- everything that is named exists


def made_by_hand() -> dict[str, set[str]]:
    """Secret -> keys, from the commands in the documentation."""
    made: dict[str, set[str]] = {}
    for command in re.findall(r"create secret generic ((?:.*\\\n)*.*)", DEPLOY):
        name, *options = shlex.split(command.replace("\\\n", " "), comments=True)
        keys = {option.partition("=")[2].partition("=")[0] for option in options if option.startswith("--from-")}
        made.setdefault(name, set()).update(keys)
    return made


@every_build
def test_every_secret_configuration_claim_and_account_is_there(folder: Path) -> None:
    objects = build(folder)
    secrets = made_by_hand()
    assert not of_kind(objects, "Secret")
    known = {
        kind: {one["metadata"]["name"] for one in of_kind(objects, kind)} for kind in ("ConfigMap", "ServiceAccount")
    }
    claims = {one["metadata"]["name"] for one in of_kind(objects, "PersistentVolumeClaim")}
    used: set[str] = set()
    for where, pod, container in containers(objects):
        for source in container.get("envFrom", []):
            if "configMapRef" in source:
                assert source["configMapRef"]["name"] in known["ConfigMap"], where
            else:
                assert source["secretRef"]["name"] in secrets, where
        for variable in container.get("env", []):
            if "valueFrom" in variable:
                key = variable["valueFrom"]["secretKeyRef"]
                assert key["key"] in secrets[key["name"]], (where, key)
        for volume in pod.get("volumes", []):
            if "persistentVolumeClaim" in volume:
                used.add(volume["persistentVolumeClaim"]["claimName"])
            if "secret" in volume:
                assert {item["key"] for item in volume["secret"]["items"]} <= secrets[volume["secret"]["secretName"]]
        mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
        templates = {
            claim["metadata"]["name"]
            for one in objects
            for claim in one.get("spec", {}).get("volumeClaimTemplates", [])
        }
        assert mounted <= {volume["name"] for volume in pod.get("volumes", [])} | templates, where
        assert pod.get("serviceAccountName", "default") in known["ServiceAccount"] | {"default"}, where
    assert used == claims, "a claim that nothing mounts, or a mount without a claim"


def test_no_secret_is_written_down() -> None:
    """Every variable whose name says that it is secret comes from a secret; settings hold none."""
    secret = re.compile(r"TOKEN|PASSWORD|SECRET|_KEY|CREDENTIAL", re.IGNORECASE)
    for folder in EVERY:
        objects = build(folder)
        for where, _, container in containers(objects):
            for variable in container.get("env", []):
                assert not (secret.search(variable["name"]) and "value" in variable), (where, variable["name"])
        for settings in of_kind(objects, "ConfigMap"):
            for name, value in settings["data"].items():
                assert not secret.search(name), name
                assert urlsplit(value).password is None, name


@every_build
def test_network_rules_name_pods_and_ports_that_exist(folder: Path) -> None:
    objects = build(folder)
    labels = [template.get("metadata", {}).get("labels", {}) for _, template in pod_templates(objects)]
    labels += [{"ray.io/is-ray-node": "yes", "ray.io/node-type": kind} for kind in ("head", "worker")]  # KubeRay's own
    policies = of_kind(objects, "NetworkPolicy")
    assert any(one["spec"]["podSelector"] == {} and "ingress" not in one["spec"] for one in policies)
    for policy in policies:
        spec = policy["spec"]
        peers = [peer for rule in spec.get("ingress", []) for peer in rule["from"]]
        peers += [peer for rule in spec.get("egress", []) for peer in rule.get("to", [])]
        selectors = [spec["podSelector"]]
        selectors += [
            peer["podSelector"] for peer in peers if "podSelector" in peer and "namespaceSelector" not in peer
        ]
        for selector in selectors:
            wanted = selector.get("matchLabels", {})
            assert any(wanted.items() <= one.items() for one in labels), (policy["metadata"]["name"], wanted)
    exposed = {port["containerPort"] for _, _, container in containers(objects) for port in container.get("ports", [])}
    opened = {
        port["port"]
        for policy in policies
        for rule in policy["spec"].get("ingress", [])
        for port in rule.get("ports", [])
    }
    assert opened <= exposed


# ---- MLflow


@every_build
def test_the_drivers_address_of_mlflow_is_a_service_that_lets_that_name_in(folder: Path) -> None:
    objects = build(folder)
    address = urlsplit(named(objects, "ConfigMap", "settings")["data"]["MLFLOW_TRACKING_URI"])
    service = named(objects, "Service", str(address.hostname))
    (port,) = service["spec"]["ports"]
    assert port["port"] == address.port
    server = named(objects, "Deployment", "mlflow")["spec"]["template"]
    assert service["spec"]["selector"].items() <= server["metadata"]["labels"].items()
    allowed = named(objects, "ConfigMap", "mlflow-settings")["data"]["MLFLOW_SERVER_ALLOWED_HOSTS"].split(",")
    for host in (address.netloc, f"mlflow.kvsweep.svc.cluster.local:{address.port}", "localhost:5001"):
        assert any(fnmatch.fnmatch(host, pattern) for pattern in allowed), host
    assert not any(fnmatch.fnmatch("evil.example:5000", pattern) for pattern in allowed)


@every_build
def test_mlflow_asks_for_a_login_and_its_probes_do_not(folder: Path) -> None:
    (container,) = named(build(folder), "Deployment", "mlflow")["spec"]["template"]["spec"]["containers"]
    words = container["args"]
    assert words[words.index("--app-name") + 1] == "basic-auth"
    assert "--serve-artifacts" in words
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}


# ---- what may do what


@every_build
def test_no_pod_runs_as_root_or_may_become_it(folder: Path) -> None:
    for where, pod, container in containers(build(folder)):
        context = pod["securityContext"]
        assert (context["runAsNonRoot"], context["seccompProfile"]) == (True, {"type": "RuntimeDefault"}), where
        assert context["runAsUser"] > 0, where
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    options = cluster_spec(build(folder)).get("autoscalerOptions")
    assert options is None or options["securityContext"]["allowPrivilegeEscalation"] is False


@every_build
def test_only_the_head_may_ask_kubernetes_or_open_the_bucket(folder: Path) -> None:
    objects = build(folder)
    head, *workers = ray_groups(objects)
    assert head["template"]["spec"]["serviceAccountName"] == "kvsweep"
    for group in workers:
        pod = group["template"]["spec"]
        assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("kvsweep-worker", False)
        (container,) = pod["containers"]
        assert {variable["name"] for variable in container["env"]} == {"HF_TOKEN"}
        assert "envFrom" not in container
    assert "annotations" not in named(objects, "ServiceAccount", "kvsweep-worker")["metadata"]


@every_build
def test_every_container_says_what_it_needs_and_memory_is_certain(folder: Path) -> None:
    for where, _, container in containers(build(folder)):
        asked, most = container["resources"]["requests"], container["resources"]["limits"]
        assert {"cpu", "memory"} <= asked.keys() & most.keys(), where
        assert asked["memory"] == most["memory"], where


def test_the_head_and_busy_workers_are_not_moved() -> None:
    objects = build(K8S / "base")
    (budget,) = of_kind(objects, "PodDisruptionBudget")
    assert budget["spec"]["selector"]["matchLabels"] == {"ray.io/node-type": "head"}
    assert budget["spec"]["minAvailable"] >= 100, "Kubernetes takes no other form for pods of a custom resource"
    for group in ray_groups(objects):
        assert group["template"]["metadata"]["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"


# ---- sweeps fit the cluster


def gpus(group: Manifest) -> int:
    """As Ray counts them: what the pod is limited to, or what it is told to say."""
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    return int(group["rayStartParams"].get("num-gpus", limits.get("nvidia.com/gpu", 0)))


def cores(quantity: str) -> Decimal:
    return Decimal(quantity[:-1]) / 1000 if quantity.endswith("m") else Decimal(quantity)


@every_sweep
def test_the_entrypoint_is_an_executable_sweep_whose_actors_fit_a_worker(folder: Path) -> None:
    objects = build(folder)
    (job,) = of_kind(objects, "RayJob")
    file, *options = shlex.split(job["spec"]["entrypoint"])
    assert os.access(ROOT / file, os.X_OK)
    assert "--failures-ok" in options, "or a failed row would start a new cluster, again and again"
    cluster = load_sweep(ROOT / file).cluster
    asked = (
        int(options[options.index("--gpus-per-actor") + 1]) if "--gpus-per-actor" in options else cluster.gpus_per_actor
    )
    assert asked == 1, "with no node there yet, nothing else can tell"
    for group in cluster_spec(objects)["workerGroupSpecs"]:
        assert gpus(group) == asked
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert cores(limits["cpu"]) >= (cluster.cpus_per_actor or 1)
    assert not any(pod.get("hostNetwork") for _, pod, _ in containers(objects))


def test_results_outlive_the_head() -> None:
    """A sweep file's own output lands on the claim, or in the bucket."""
    for folder in EVERY:
        objects = build(folder)
        root = named(objects, "ConfigMap", "settings")["data"]["KVSWEEP_OUTPUT_ROOT"]
        if "://" in root:
            assert not of_kind(objects, "PersistentVolumeClaim"), folder
            continue
        (container,) = ray_groups(objects)[0]["template"]["spec"]["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert mounts[f"{root}/{Path(load_sweep(ROOT / 'jobs' / 'sweep.yaml').output).parts[0]}"] == "results"
        volumes = {volume["name"]: volume for volume in ray_groups(objects)[0]["template"]["spec"]["volumes"]}
        assert volumes["results"]["persistentVolumeClaim"] == {"claimName": "results"}


def described(spec: ModelSpec) -> ModelDescription:
    """The papers' models from their published configurations, without the Hub."""
    return ModelDescription(
        config={"hidden_size": 4096, "intermediate_size": 14336},
        dtype=spec.dtype,
        layout=LAYOUTS[spec.label],
        parameters=8_000_000_000,
        max_positions=131072,
        vocabulary=150_000,
        fingerprint=spec.source,
        tokenizer_fingerprint="tokenizer",
        chat_template=True,
    )


ENTRYPOINTS = ("sweep", "quickstart")
"""What manifests and the documentation start first."""


@pytest.mark.parametrize("file", sorted((ROOT / "jobs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_ready_sweep_plans_where_its_data_are(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data sets that this machine lacks are all that may be missing."""
    monkeypatch.setattr(pipeline.plan, "describe", described)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("KVSWEEP_CACHE", str(tmp_path / "cache"))
    missing: list[tuple[str, str]] = []
    try:
        plan, _, _ = open_sweep(file, RunOptions(output=str(tmp_path / "out"))).plan(RunOptions())
        assert plan.jobs
    except SpecError as error:
        missing = error.problems
    assert all(" needs the file " in text for _, text in missing), missing
    assert not missing or file.stem not in ENTRYPOINTS, "what a manifest runs needs no data of its own"


# ---- what the documentation says


def test_the_documentation_applies_what_there_is_and_names_every_overlay() -> None:
    applied = set(re.findall(r"--kustomize (k8s/\S+)", DEPLOY))
    assert applied
    assert {ROOT / path for path in applied} <= set(EVERY)
    listed = set(re.findall(r"`([a-z-]+)`", "".join(re.findall(r"^\| `.*? \|", DEPLOY, re.MULTILINE))))
    assert listed >= {folder.name for folder in OVERLAYS}
    assert {folder.name for folder in SWEEPS} == {folder.name for folder in OVERLAYS}


def test_the_documentation_builds_the_images_as_the_dockerfile_says() -> None:
    def commands(text: str) -> set[tuple[str, ...]]:
        found = re.findall(r"^(?:#   )?(docker build .*? \.)(?: |$)", text, re.MULTILINE)
        return {tuple(command.split()) for command in found}

    assert commands(DEPLOY) == commands(DOCKERFILE)
    assert len(commands(DOCKERFILE)) == 3


def test_sweeps_of_the_documentation_exist() -> None:
    named_files = set(re.findall(r"\bjobs/[\w/-]+\.yaml", DEPLOY)) - {"jobs/mine.yaml"}
    assert all((ROOT / name).is_file() for name in named_files)
    assert named_files >= {"jobs/sweep.yaml", "jobs/quickstart.yaml"}
