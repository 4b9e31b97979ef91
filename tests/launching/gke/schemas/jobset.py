"""The parts of jobset.x-k8s.io/v1alpha2 as strict models, written from its API reference.

The Job, Pod and metadata inside are the models of the `kubernetes` client, which are generated from Kubernetes' own
OpenAPI description: unknown fields and wrong types are refused by both.
"""

from __future__ import annotations

from typing import Annotated, Literal

from kubernetes.client.models.v1_job_template_spec import V1JobTemplateSpec
from kubernetes.client.models.v1_object_meta import V1ObjectMeta
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

Name = Annotated[StrictStr, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
Count = Annotated[StrictInt, Field(ge=0, le=2**31 - 1)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Rule(Strict):
    name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$", max_length=128)]
    action: Literal[
        "FailJobSet",
        "RestartJobSet",
        "RestartJobSetAndIgnoreMaxRestarts",
        "RestartJob",
        "RestartJobAndIgnoreMaxRestarts",
    ]
    onJobFailureReasons: list[
        Literal[
            "BackoffLimitExceeded",
            "DeadlineExceeded",
            "FailedIndexes",
            "MaxFailedIndexesExceeded",
            "PodFailurePolicy",
        ]
    ] = []
    onJobFailureMessagePatterns: list[StrictStr] = []
    targetReplicatedJobs: list[Name] = []


class FailurePolicy(Strict):
    maxRestarts: Count = 0
    restartStrategy: Literal["Recreate", "BlockingRecreate", "InPlaceRestart"] = "Recreate"
    rules: list[Rule] = []


class Network(Strict):
    enableDNSHostnames: StrictBool = True
    subdomain: Name | None = None
    publishNotReadyAddresses: StrictBool = True


class SuccessPolicy(Strict):
    operator: Literal["All", "Any"]
    targetReplicatedJobs: list[Name] = []


class Coordinator(Strict):
    replicatedJob: Name
    jobIndex: Count = 0
    podIndex: Count = 0


class ReplicatedJob(Strict):
    name: Name
    groupName: Name = "default"
    replicas: Count = 1
    template: V1JobTemplateSpec


class Spec(Strict):
    replicatedJobs: Annotated[list[ReplicatedJob], Field(min_length=1)]
    network: Network | None = None
    successPolicy: SuccessPolicy | None = None
    failurePolicy: FailurePolicy | None = None
    suspend: StrictBool | None = None
    coordinator: Coordinator | None = None
    managedBy: StrictStr | None = None
    ttlSecondsAfterFinished: Count | None = None


class JobSet(Strict):
    apiVersion: Literal["jobset.x-k8s.io/v1alpha2"]
    kind: Literal["JobSet"]
    metadata: V1ObjectMeta
    spec: Spec
