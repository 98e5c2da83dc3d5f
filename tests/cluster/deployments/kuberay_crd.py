"""A JSON schema out of a CRD of KubeRay, closed: a field that the CRD does not list is refused, as by `kubectl apply`.

    python -m tests.cluster.deployments.kuberay_crd CRD configs/kuberay.yaml configs/kuberay-cpu.yaml

validates those files; the CRD is helm-chart/kuberay-operator/crds/ray.io_rayservices.yaml of KubeRay. Left out: the
status, which no file has; descriptions, defaults and formats; pod templates, which Kubernetes' own schema checks; rules
in CEL.
"""

import sys
from pathlib import Path
from typing import Any

import jsonschema
import yaml

_TEMPLATE = {"type": "object", "properties": {"metadata": {}, "spec": {}}, "additionalProperties": False}
_CONSTRAINTS = ("type", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems")
_COMBINED = ("required", "anyOf", "oneOf", "allOf", "not")


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Of an openAPIV3Schema. Objects that the CRD lets have any field (maps, preserved unknown fields) stay open."""
    made = {key: schema[key] for key in (*_CONSTRAINTS, *_COMBINED) if key in schema}
    if schema.get("nullable") and "type" in made:
        made["type"] = [made["type"], "null"]
    if properties := schema.get("properties"):
        made["properties"] = {
            name: _TEMPLATE if name == "template" else closed(one) for name, one in sorted(properties.items())
        }
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            made["additionalProperties"] = False
    elif isinstance(values := schema.get("additionalProperties"), dict):
        made["additionalProperties"] = closed(values)
    if "items" in schema:
        made["items"] = closed(schema["items"])
    return made


def schema_of(crd: dict[str, Any], version: str = "v1") -> dict[str, Any]:
    """The schema of the CRD's objects of that API version, without their status. Raises KeyError: it has none."""
    schemas = {one["name"]: one["schema"]["openAPIV3Schema"] for one in crd["spec"]["versions"]}
    made = closed(schemas[version])
    made["properties"].pop("status", None)
    made["properties"] |= {
        "apiVersion": {"const": f"{crd['spec']['group']}/{version}"},
        "kind": {"const": crd["spec"]["names"]["kind"]},
    }
    made["required"] = ["apiVersion", "kind", "metadata", "spec"]
    return made


def main(crd: str, *files: str) -> None:
    schema = schema_of(yaml.safe_load(Path(crd).read_text()))
    for file in files:
        for document in yaml.safe_load_all(Path(file).read_text()):
            jsonschema.validate(document, schema)
        print(f"{file}: valid")


if __name__ == "__main__":
    main(*sys.argv[1:])
