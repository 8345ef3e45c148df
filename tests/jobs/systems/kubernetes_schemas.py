"""What Kubernetes's API server would not create, of JobSets, Jobs and Services.

Jobs and Services are read by the models of Kubernetes's own client, JobSets by the schema of their CRD (jobset_crd.json) and
by the models of kubeflow_trainer_api; fields that these do not know are refused, as with strict validation.
"""

from __future__ import annotations

import functools
import json
import pathlib
import re

# Plural -> kind, API version, and the resource as rights and errors name it.
KINDS = {
    "jobsets": ("JobSet", "jobset.x-k8s.io/v1alpha2", "jobsets.jobset.x-k8s.io"),
    "jobs": ("Job", "batch/v1", "jobs.batch"),
    "services": ("Service", "v1", "services"),
    "pods": ("Pod", "v1", "pods"),
}
LABEL = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
DNS = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
CRD = pathlib.Path(__file__).parent / "jobset_crd.json"


class Refused(Exception):
    """An answer that is an error, with the Status that the API server would write."""

    def __init__(self, code, reason, message, *, headers=None, **details):
        super().__init__(message)
        self.code, self.headers = code, headers or {}
        status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        self.body = {**status, "message": message, "reason": reason, "details": details, "code": code}


def unknown_fields(value, known, path=""):
    """The paths of what `known`, a value as a model writes it after reading it, has lost or changed."""
    if isinstance(value, dict) and isinstance(known, dict):
        for key, one in value.items():
            yield from unknown_fields(one, known.get(key), f"{path}.{key}" if path else key)
    elif isinstance(value, list) and isinstance(known, list) and len(value) == len(known):
        for index, (one, other) in enumerate(zip(value, known)):
            yield from unknown_fields(one, other, f"{path}[{index}]")
    elif value != known:
        yield path


def violations(value, schema, path):
    """What in a value is against a schema of OpenAPI, as a CRD has it: (path, what)."""
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    kind = schema.get("type")
    if kind and (not isinstance(value, kinds[kind]) or (kind == "integer" and isinstance(value, bool))):
        yield path, f"Invalid value: must be of type {kind}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield path, f"Unsupported value: {value!r}"
    if isinstance(value, str) and not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 1 << 30):
        yield path, "Too long or too short"
    if isinstance(value, int) and not schema.get("minimum", -(1 << 31)) <= value <= schema.get(
        "maximum", (1 << 31) - 1
    ):
        yield path, "Invalid value: out of range"
    if isinstance(value, list):
        if len(value) > schema.get("maxItems", 1 << 30):
            yield path, "Too many"
        keys = [
            tuple(one.get(key) for key in schema.get("x-kubernetes-list-map-keys", ()))
            for one in value
            if isinstance(one, dict)
        ]
        if schema.get("x-kubernetes-list-map-keys") and len({*keys}) < len(keys):
            yield path, "Duplicate value"
        for index, one in enumerate(value):
            yield from violations(one, schema["items"], f"{path}[{index}]")
    if isinstance(value, dict):
        yield from ((f"{path}.{key}", "Required value") for key in schema.get("required", ()) if key not in value)
        properties = schema.get("properties", {})
        is_open = schema.get("x-kubernetes-preserve-unknown-fields") or not properties
        for key, one in value.items():
            if key in properties:
                yield from violations(one, properties[key], f"{path}.{key}")
            elif not is_open:
                yield f"{path}.{key}", "unknown field"


@functools.cache
def api_client():
    from kubernetes import client

    return client.ApiClient()


def check_model(document, model, kind):
    """Raises Refused for fields that a model of Kubernetes's client does not know, and for values that are none of theirs."""
    api = api_client()
    try:
        found = [
            *unknown_fields(document, api.sanitize_for_serialization(api._ApiClient__deserialize(document, model)))
        ]
    except ValueError as error:  # of pydantic
        raise Refused(422, "Invalid", f"{kind} is invalid: {' '.join(str(error).split())}") from None
    if found:
        raise Refused(400, "BadRequest", f'{kind} cannot be handled: strict decoding error: unknown field "{found[0]}"')


def check_job_spec(spec, kind, path="spec"):
    pod = spec["template"]["spec"]
    wrong = None
    if pod.get("restartPolicy") not in ("Never", "OnFailure"):
        wrong = "template.spec.restartPolicy: Required value: valid values: OnFailure, Never"
    elif spec.get("completionMode") == "Indexed" and spec.get("completions") is None:
        wrong = "completions: Required value: when completion mode is Indexed"
    elif spec.get("podFailurePolicy") and pod["restartPolicy"] != "Never":
        wrong = "template.spec.restartPolicy: Invalid value: only Never is supported when podFailurePolicy is set"
    if wrong:
        raise Refused(422, "Invalid", f"{kind} is invalid: {path}.{wrong}")


def check_job_set(document, kind):
    from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

    schema = json.loads(CRD.read_text(encoding="utf-8"))["openAPIV3Schema"]
    found = sorted(violations(document, schema, ""), key=lambda one: one[1] != "unknown field")
    for path, what in found:
        if what == "unknown field":
            raise Refused(400, "BadRequest", f'strict decoding error: unknown field "{path[1:]}"')
        raise Refused(422, "Invalid", f"{kind} is invalid: {path[1:]}: {what}")
    lost = [*unknown_fields(document, JobsetV1alpha2JobSet.from_dict(document).to_dict())]
    if lost:
        raise Refused(400, "BadRequest", f'strict decoding error: unknown field "{lost[0]}"')
    for jobs in document["spec"]["replicatedJobs"]:
        check_model(jobs["template"], "V1JobTemplateSpec", kind)
        check_job_spec(jobs["template"]["spec"], kind, "spec.replicatedJobs[0].template.spec")
        last = f"{document['metadata']['name']}-{jobs['name']}-{jobs.get('replicas', 1) - 1}"
        last += f"-{jobs['template']['spec'].get('completions', 1) - 1}-abcde"
        if len(last) > 63 or not DNS.fullmatch(last):  # as JobSet's own webhook
            raise Refused(
                422, "Invalid", f"{kind} is invalid: spec.replicatedJobs[0].name: {last}: pod name is too long"
            )


def check_new(document, plural, namespace):
    """Raises Refused for what the API server would not create."""
    kind, version, resource = KINDS[plural]
    if not isinstance(document, dict) or (document.get("kind"), document.get("apiVersion")) != (kind, version):
        raise Refused(400, "BadRequest", f"the object provided is no {kind} of {version}")
    metadata = document.get("metadata", {})
    name, place = metadata.get("name", ""), metadata.get("namespace", namespace)
    kind = f'{kind}{resource.removeprefix(plural)} "{name}"'
    if not DNS.fullmatch(name) or len(name) > 63:
        raise Refused(422, "Invalid", f"{kind} is invalid: metadata.name: Invalid value: {name!r}")
    if place != namespace:
        raise Refused(400, "BadRequest", "the namespace of the provided object does not match that of the request")
    for key, value in metadata.get("labels", {}).items():
        if not LABEL.fullmatch(value) or len(value) > 63 or len(key.rpartition("/")[2]) > 63:
            raise Refused(422, "Invalid", f"{kind} is invalid: metadata.labels: Invalid value: {value!r}")
    if plural == "jobsets":
        check_job_set(document, kind)
    else:
        check_model(document, f"V1{KINDS[plural][0]}", kind)
    if plural == "jobs":
        check_job_spec(document["spec"], kind)
