"""The JSON schema of a chart's values: every key is listed, nothing else is accepted."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_SHA256 = "^sha256:[0-9a-f]{64}$"
_QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|[kMGTPE]i?)?$"
_DURATION = "^([0-9]+(ms|s|m|h|d))+$"
_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_LABELS: Schema = {"type": "object", "additionalProperties": _TEXT}
_PEERS: Schema = {"type": "array", "items": {"type": "object", "minProperties": 1}}


def values_schema(runtime: str, *, allow_tag: bool) -> Schema:
    """Draft-07 schema of the values of one chart.

    `runtime` is the only one that passed the gate; `allow_tag` lets the image run by tag.
    """
    properties = {
        "nameOverride": _name(),
        "fullnameOverride": _name(),
        "runtime": _object({"kind": {"const": runtime}, "extraArgs": _list(_TEXT)}),
        "image": _serving_image(allow_tag),
        "model": _model(),
        **_capacity(),
        **_placement(),
        **_pod(),
        **_operation(),
        # Helm adds this one where the chart is a dependency of another.
        "global": {"type": "object"},
    }
    schema = _object(properties, optional=("global",))
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values", **schema}


def _serving_image(allow_tag: bool) -> Schema:
    image = {"repository": {"type": "string", "minLength": 1}, "pullPolicy": _pull_policy()}
    if allow_tag:
        digest = {"type": "string", "pattern": f"^$|{_SHA256}"}
        # Not `latest`: what runs would depend on when it was pulled.
        tag = {"type": "string", "pattern": "^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$", "not": {"const": "latest"}}
        image |= {"digest": digest, "tag": tag}
    else:
        image |= {"digest": {"type": "string", "pattern": _SHA256}}
    return _object({**image, "pullSecrets": _list(_TEXT)})


def _capacity() -> Schema:
    return {
        "replicas": _integer(0),
        "gpu": _object({"count": _integer(0), "resource": _TEXT, "runtimeClassName": _TEXT}),
        "resources": _object(
            {
                "requests": _object(
                    {"cpu": _quantity(), "memory": _quantity(), "ephemeral-storage": _quantity()}
                ),
                "limits": _object(
                    {"cpu": _quantity(), "memory": _quantity(), "ephemeral-storage": _quantity()},
                    optional=("cpu",),
                ),
            }
        ),
        "shm": _object({"sizeLimit": _quantity()}),
        "strategy": _object(
            {
                "type": {"enum": ["RollingUpdate", "Recreate"]},
                "maxSurge": _integer(0),
                "maxUnavailable": _integer(0),
            }
        ),
    }


def _placement() -> Schema:
    return {
        "nodeSelector": _LABELS,
        "tolerations": _list(_toleration()),
        "affinity": {"type": "object"},
        "topologySpread": _object(
            {
                "enabled": _FLAG,
                "topologyKey": _TEXT,
                "maxSkew": _integer(1),
                "whenUnsatisfiable": {"enum": ["DoNotSchedule", "ScheduleAnyway"]},
            }
        ),
    }


def _pod() -> Schema:
    return {
        "probes": _object(
            {
                "startup": _object({"periodSeconds": _integer(1), "failureThreshold": _integer(1)}),
                "readiness": _probe(),
                "liveness": _probe(),
            }
        ),
        "drain": _object({"preStopSeconds": _integer(1), "gracePeriodSeconds": _integer(10)}),
        "auth": _object({"enabled": _FLAG, "existingSecret": {"type": "string", "minLength": 1}}),
        "extraEnv": _list(
            _object({"name": _TEXT, "value": _TEXT, "valueFrom": {"type": "object"}}, required=("name",))
        ),
        "podAnnotations": _LABELS,
        "podLabels": _LABELS,
        "podSecurity": _object({"runAsUser": _integer(1), "runAsGroup": _integer(1), "fsGroup": _integer(1)}),
    }


def _operation() -> Schema:
    return {
        "service": _object(
            {"type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]}, "port": _integer(1, 65535)}
        ),
        "autoscaling": _object(
            {
                "mode": {"enum": ["none", "hpa", "keda"]},
                "minReplicas": _integer(1),
                "maxReplicas": _integer(1),
                "waitingRequests": _integer(1),
                "kvUsageRatio": {"type": "number", "minimum": 0.01, "maximum": 1},
                "stabilizationSeconds": _integer(0),
                "prometheusAddress": _TEXT,
            }
        ),
        "podDisruptionBudget": _object({"enabled": _FLAG, "maxUnavailable": _integer(0)}),
        "networkPolicy": _object(
            {"enabled": _FLAG, "ingressFrom": _PEERS, "scrapeFrom": _PEERS, "egressTo": _PEERS}
        ),
        "monitoring": _monitoring(),
        "ingress": _object(
            {
                "enabled": _FLAG,
                "className": _TEXT,
                "host": _TEXT,
                "tlsSecretName": _TEXT,
                "annotations": _LABELS,
                "oauth2": _object(
                    {
                        "enabled": _FLAG,
                        "issuerUrl": _TEXT,
                        "emailDomains": _list(_TEXT),
                        "existingSecret": _TEXT,
                        "image": _image(),
                    }
                ),
            }
        ),
    }


def _model() -> Schema:
    return _object(
        {
            "name": {"type": "string", "minLength": 1},
            "digest": {"type": "string", "pattern": _SHA256},
            "sizeBytes": _integer(1),
            "source": {"enum": ["pvc", "image", "http", "s3"]},
            "verify": _FLAG,
            "pvc": _object({"claimName": _TEXT, "subPath": _TEXT}),
            "image": _object({**_image()["properties"], "pullPolicy": _pull_policy()}),
            "http": _object({"url": {"type": "string", "pattern": "^$|^https?://"}, "existingSecret": _TEXT}),
            "s3": _object(
                {
                    "uri": {"type": "string", "pattern": "^$|^s3://"},
                    "endpoint": _TEXT,
                    "region": _TEXT,
                    "existingSecret": _TEXT,
                    "image": _image(),
                }
            ),
        }
    )


def _monitoring() -> Schema:
    rules = {
        "enabled": _FLAG,
        "labels": _LABELS,
        "queueLength": _integer(0),
        "queueFor": _duration(),
        "baselineTokensPerSecond": {"type": "number", "minimum": 0},
        "throughputDropRatio": _ratio(),
        "throughputFor": _duration(),
        "kvUsageRatio": _ratio(),
        "kvUsageFor": _duration(),
        "decodeP95Ms": _integer(1),
        "decodeFor": _duration(),
    }
    return _object(
        {
            "serviceMonitor": _object({"enabled": _FLAG, "interval": _duration(), "labels": _LABELS}),
            "rules": _object(rules),
            "dashboard": _object({"enabled": _FLAG, "labels": _LABELS}),
        }
    )


def _object(
    properties: Schema, *, optional: tuple[str, ...] = (), required: tuple[str, ...] | None = None
) -> Schema:
    names = [n for n in properties if n not in optional] if required is None else list(required)
    return {
        "type": "object",
        "additionalProperties": False,
        "required": names,
        "properties": properties,
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _integer(minimum: int, maximum: int | None = None) -> Schema:
    limits = {"minimum": minimum} if maximum is None else {"minimum": minimum, "maximum": maximum}
    return {"type": "integer", **limits}


def _ratio() -> Schema:
    """The threshold of an alert; at 0 it would always fire, at 1 never."""
    return {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}


def _quantity() -> Schema:
    return {"type": "string", "pattern": _QUANTITY}


def _duration() -> Schema:
    return {"type": "string", "pattern": _DURATION}


def _name() -> Schema:
    return {"type": "string", "pattern": "^$|^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 48}


def _pull_policy() -> Schema:
    return {"enum": ["IfNotPresent", "Always", "Never"]}


def _image() -> Schema:
    return _object({"repository": _TEXT, "digest": {"type": "string", "pattern": f"^$|{_SHA256}"}})


def _probe() -> Schema:
    return _object(
        {"periodSeconds": _integer(1), "timeoutSeconds": _integer(1), "failureThreshold": _integer(1)}
    )


def _toleration() -> Schema:
    return _object(
        {
            "key": _TEXT,
            "operator": {"enum": ["Exists", "Equal"]},
            "value": _TEXT,
            "effect": {"enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]},
            "tolerationSeconds": _integer(0),
        },
        required=(),
    )
