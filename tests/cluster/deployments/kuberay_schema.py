"""The fields of KubeRay's RayService (ray.io/v1, KubeRay 1.6) that our files use, written from its API reference.

Closed: any other field is refused, as the whole schema would refuse a misspelt one. A pod's spec is left to Kubernetes'
own schema. A field that a file is to use newly is added here by hand, after a look at KubeRay's reference.
"""

from typing import Any

Schema = dict[str, Any]
STRING, BOOLEAN, COUNT = {"type": "string"}, {"type": "boolean"}, {"type": "integer", "minimum": 0}
ANY_OBJECT = {"type": "object"}  # Kubernetes' own types, which are checked with a pod
RAY_START_PARAMS = {"type": "object", "additionalProperties": STRING}  # numbers, too, are strings


def fields(*required: str, **known: Schema) -> Schema:
    return {"type": "object", "properties": known, "required": list(required), "additionalProperties": False}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


POD_TEMPLATE = fields("spec", metadata=ANY_OBJECT, spec=ANY_OBJECT)
SECRET_KEY = fields("name", "key", name=STRING, key=STRING)
CREDENTIAL = fields(value=STRING, valueFrom=fields("secretKeyRef", secretKeyRef=SECRET_KEY))

HEAD_GROUP = fields("template", rayStartParams=RAY_START_PARAMS, template=POD_TEMPLATE, serviceType=STRING)
WORKER_GROUP = fields(
    *("groupName", "minReplicas", "maxReplicas", "template"),
    groupName=STRING,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    idleTimeoutSeconds=COUNT,
    rayStartParams=RAY_START_PARAMS,
    template=POD_TEMPLATE,
)
AUTOSCALER = fields(
    version=one_of("v1", "v2"),
    upscalingMode=one_of("Default", "Aggressive", "Conservative"),
    idleTimeoutSeconds=COUNT,
    resources=ANY_OBJECT,
    securityContext=ANY_OBJECT,
)
RAY_CLUSTER = fields(
    "headGroupSpec",
    rayVersion=STRING,
    authOptions=fields(mode=one_of("disabled", "token"), secretName=STRING),
    gcsFaultToleranceOptions=fields(
        redisAddress=STRING, redisUsername=CREDENTIAL, redisPassword=CREDENTIAL, externalStorageNamespace=STRING
    ),
    enableInTreeAutoscaling=BOOLEAN,
    autoscalerOptions=AUTOSCALER,
    headGroupSpec=HEAD_GROUP,
    workerGroupSpecs={"type": "array", "items": WORKER_GROUP},
)
RAY_SERVICE = fields(
    *("apiVersion", "kind", "metadata", "spec"),
    apiVersion=one_of("ray.io/v1"),
    kind=one_of("RayService"),
    metadata=fields("name", name=STRING, namespace=STRING, labels=ANY_OBJECT, annotations=ANY_OBJECT),
    spec=fields(
        "rayClusterConfig",
        serviceUnhealthySecondThreshold=COUNT,
        deploymentUnhealthySecondThreshold=COUNT,
        rayClusterDeletionDelaySeconds=COUNT,
        serveConfigV2=STRING,
        rayClusterConfig=RAY_CLUSTER,
    ),
)
