"""What an API server refuses beyond fields and types, as Kubernetes' and JobSet's references have it; and all together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pydantic
from kubernetes.client.models.v1_config_map import V1ConfigMap

from tests.launching.gke.schemas.jobset import JobSet

LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
DNS_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?([kMGTPE]i?|m)?")


def problems(manifest: Mapping[str, Any]) -> list[str]:
    """Why the cluster would refuse the manifest; empty if it would not."""
    model = {"JobSet": JobSet, "ConfigMap": V1ConfigMap}[manifest["kind"]]
    try:
        model.model_validate(manifest)
    except pydantic.ValidationError as e:
        return [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in e.errors()]
    rules = _jobset if manifest["kind"] == "JobSet" else _config_map
    return [*_snake_case(manifest), *_metadata(manifest["metadata"]), *rules(manifest)]


def _snake_case(value: Any, where: str = "") -> Iterator[str]:
    """The client's models accept Python's own spelling of a field, too; the server does not."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if "_" in key and "/" not in key and not where.endswith(("labels", "annotations", "data", "nodeSelector")):
                yield f"{where}.{key}: unknown field"
            yield from _snake_case(inner, f"{where}.{key}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _snake_case(inner, f"{where}.{number}")


def _metadata(metadata: Mapping[str, Any], named: bool = True) -> Iterator[str]:
    if named and not DNS_SUBDOMAIN.fullmatch(metadata.get("name", "")):
        yield f"metadata.name: {metadata.get('name')!r}"
    if "namespace" in metadata and not DNS_LABEL.fullmatch(metadata["namespace"]):
        yield f"metadata.namespace: {metadata['namespace']!r}"
    yield from _labels("metadata.labels", metadata.get("labels", {}))
    for key in metadata.get("annotations", {}):
        if not LABEL_KEY.fullmatch(key):
            yield f"metadata.annotations: {key!r}"


def _labels(where: str, labels: Mapping[str, str]) -> Iterator[str]:
    for key, value in labels.items():
        if not LABEL_KEY.fullmatch(key) or not LABEL_VALUE.fullmatch(value):
            yield f"{where}: {key!r}: {value!r}"


def _config_map(manifest: Mapping[str, Any]) -> Iterator[str]:
    size = 0
    for key, value in manifest.get("data", {}).items():
        size += len(value.encode())
        if not re.fullmatch(r"[-._a-zA-Z0-9]{1,253}", key):
            yield f"data: {key!r}"
    if size > 1 << 20:
        yield f"data: {size} bytes"


def _jobset(manifest: Mapping[str, Any]) -> Iterator[str]:
    name, spec = manifest["metadata"]["name"], manifest["spec"]
    jobs = {job["name"] for job in spec["replicatedJobs"]}
    rule_names = [rule["name"] for rule in spec.get("failurePolicy", {}).get("rules", [])]
    if len(set(rule_names)) < len(rule_names):
        yield "failurePolicy.rules: names are not unique"
    for rule in spec.get("failurePolicy", {}).get("rules", []):
        yield from (f"rules: no replicatedJob {target}" for target in set(rule.get("targetReplicatedJobs", [])) - jobs)
    for replicated in spec["replicatedJobs"]:
        job = replicated["template"]["spec"]
        last = f"{name}-{replicated['name']}-{replicated.get('replicas', 1) - 1}"
        for child in (last, f"{last}-{job.get('completions', 1) - 1}-abcde"):
            if not DNS_LABEL.fullmatch(child):
                yield f"{child!r}: not a name of at most 63 characters"
        yield from _job(job)


def _job(job: Mapping[str, Any]) -> Iterator[str]:
    pod = job["template"]["spec"]
    containers = {container["name"] for container in pod["containers"]}
    if job.get("completionMode", "NonIndexed") not in ("Indexed", "NonIndexed"):
        yield "completionMode"
    if job.get("completionMode") == "Indexed" and "completions" not in job:
        yield "completions: required for an indexed job"
    if pod.get("restartPolicy") not in ("Never", "OnFailure"):
        yield "restartPolicy: Never or OnFailure in a job"
    if "podFailurePolicy" in job and pod.get("restartPolicy") != "Never":
        yield "podFailurePolicy: only with restartPolicy Never"
    for rule in job.get("podFailurePolicy", {}).get("rules", []):
        yield from _pod_failure_rule(rule, containers)
    yield from _metadata(job["template"].get("metadata", {}), named=False)
    yield from _pod(pod)


def _pod_failure_rule(rule: Mapping[str, Any], containers: set[str]) -> Iterator[str]:
    if rule["action"] not in ("FailJob", "FailIndex", "Ignore", "Count"):
        yield f"podFailurePolicy: action {rule['action']}"
    if ("onExitCodes" in rule) == ("onPodConditions" in rule):
        yield "podFailurePolicy: exactly one of onExitCodes and onPodConditions"
    codes = rule.get("onExitCodes")
    if codes:
        values = codes["values"]
        if codes["operator"] not in ("In", "NotIn") or not values or values != sorted(set(values)):
            yield f"podFailurePolicy: {codes}"
        if codes["operator"] == "In" and 0 in values:
            yield "podFailurePolicy: 0 is not a failure"
        if codes.get("containerName", next(iter(containers))) not in containers:
            yield f"podFailurePolicy: no container {codes['containerName']}"


def _pod(pod: Mapping[str, Any]) -> Iterator[str]:
    yield from _labels("nodeSelector", pod.get("nodeSelector", {}))
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    for volume in volumes:
        if not DNS_LABEL.fullmatch(volume):
            yield f"volumes: {volume!r}"
    for container in pod["containers"]:
        if not DNS_LABEL.fullmatch(container["name"]):
            yield f"containers: {container['name']!r}"
        if not container.get("image"):
            yield "containers: no image"
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in volumes:
                yield f"volumeMounts: no volume {mount['name']}"
        for env in container.get("env", []):
            if not re.fullmatch(r"[-._a-zA-Z][-._a-zA-Z0-9]*", env["name"]) or ("value" in env) == ("valueFrom" in env):
                yield f"env: {env}"
        requests, limits = (container.get("resources", {}).get(kind, {}) for kind in ("requests", "limits"))
        for name, amount in {**requests, **limits}.items():
            if not QUANTITY.fullmatch(amount):
                yield f"resources: {name}: {amount}"
            if "/" in name and requests.get(name, limits.get(name)) != limits.get(name):
                yield f"resources: {name}: an extended resource is requested as it is limited"
