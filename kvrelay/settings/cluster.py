"""Settings of the HTTP front end, of the cluster's processes, and of the planner."""

import re
from typing import Self

from pydantic import ValidationInfo, field_validator, model_validator

from kvrelay.settings.choices import PlannerMode, TlsMode, UnknownFields
from kvrelay.settings.section import Section, setting
from kvrelay.types import BOTH, Role

NEVER_NONE = {  # deployment -> why it always has one
    "decode": "without a decode worker no request can be answered; keep at least 1",
    "prefill": "requests that are on their way to a prefill worker would fail; keep at least 1, or start the cluster "
    "with --prefill 0 (cluster.prefill: 0), where each worker computes prompts and decodes",
    "ingress": "without an ingress no request can arrive; keep at least 1",
}
LEAST_PORTS = 6  # of a worker: requests, KV in and out, its host tier in the cluster's store, UCX


def _not_none(count: object, field: ValidationInfo) -> object:
    """Raises ValueError with the reason for a count of 0."""
    if count in (0, "0"):
        raise ValueError(f"cannot be 0: {NEVER_NONE[str(field.field_name).rpartition('_')[2]]}")
    return count


class ServeSettings(Section):
    """The OpenAI HTTP front end."""

    host: str = setting("127.0.0.1", "Address to listen on; under `serve deploy`: http_options in the file.")
    port: int = setting(8000, "HTTP port; under `serve deploy`: http_options in the file.", ge=1, le=65535)
    request_timeout_s: float = setting(600.0, "A request that takes longer fails.", unit="s", gt=0)
    unknown_fields: UnknownFields = setting(
        "ignore",
        "Fields of requests that this server does not know: ignore them (and list them in the header "
        "x-kvrelay-ignored), or refuse the request.",
    )
    trust_request_chat_template: bool = setting(
        False,
        "Whether a request may bring its own chat template. It runs in Jinja's sandbox, which limits neither its time "
        "nor its memory: only for clients that you trust.",
    )
    api_key: str | None = setting(
        None,
        "Requests must carry it as a bearer token; default: $KVRELAY_API_KEY, if set. Ray's dashboard shows a key "
        "given in a file for `serve deploy`.",
    )
    api_keys_file: str | None = setting(
        None,
        "File of tenants' API keys, made by `kvrelay keys`, at the same path on every host with an ingress; "
        "`serve.api_key` is then the operator's key. Changes are read within 2 s.",
    )


class ClusterSettings(Section):
    """How many processes of each kind, on what hardware, and how they trust each other."""

    prefill: int = setting(1, "Prefill workers; 0: each worker computes prompts, for others too, and decodes.", ge=0)
    decode: int = setting(1, "Decode workers.", ge=1)
    ingress: int = setting(1, "Ingress replicas.", ge=1)
    cores_per_worker: int | None = setting(
        None,
        "Physical CPU cores that each worker is pinned to: its own, of one NUMA node, while there are enough; "
        "default: a fair share of the node among the workers wanted at its start, so set it where workers are added "
        "later.",
        unit="cores",
        ge=1,
    )
    num_gpus_per_worker: float = setting(0.0, "Ray GPUs that each worker requests.", unit="GPUs", ge=0)
    drain_timeout_s: float = setting(
        60.0,
        "How long a worker or an ingress that is to stop may take. Its running sequences move to other workers with "
        "their KV; what can neither move nor end in this time continues on another worker from its text.",
        unit="s",
        ge=0,
        le=3600,
    )
    dashboard_port: int = setting(
        8265, "Port of Ray's dashboard, another when it is taken; no effect under `serve deploy`.", ge=1, le=65535
    )
    secret: str | None = setting(
        None,
        "Authenticates workers to each other until Ray stops; default: $KVRELAY_SECRET, else random at start. Ray's "
        "dashboard shows a secret given in a file for `serve deploy`.",
    )
    worker_ports: str | None = setting(
        None,
        "Ports that workers and nodes of the KV store listen on for requests and KV, such as 20000-20099: up to six "
        "for each process of a host; default: any free port.",
    )
    tls: TlsMode = setting(
        "auto",
        "Mutual TLS 1.3 between workers, ingresses and nodes of the KV store, for requests and for KV over tcp; auto: "
        "for what listens at an address that other hosts reach, not at a loopback address nor on Unix sockets; true: "
        "for those too. Not for nixl.",
    )
    tls_dir: str | None = setting(
        None,
        "Folder with tls.crt, tls.key and ca.crt in PEM, as Kubernetes mounts a TLS secret, at the same path on every "
        "node; ca.crt must serve this cluster alone; default: an authority derived from the cluster's secret issues a "
        "certificate to each process.",
    )

    def first_role(self, built_as: Role) -> str:
        """The role in which a worker begins."""
        return str(built_as) if self.prefill or built_as is Role.PREFILL else BOTH

    @property
    def ports(self) -> range:
        """`worker_ports` as a range; empty: any free port."""
        if self.worker_ports is None:
            return range(0)
        first, _, last = self.worker_ports.partition("-")
        return range(int(first), int(last) + 1)

    @field_validator("decode", "ingress", mode="before")
    @classmethod
    def _check_not_none(cls, count: object, field: ValidationInfo) -> object:
        return _not_none(count, field)

    @model_validator(mode="after")
    def _check_ports(self) -> Self:
        if self.worker_ports is None:
            return self
        match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", self.worker_ports)
        if match is None or not 1024 <= int(match[1]) <= int(match[2]) <= 65535:
            raise ValueError(f"worker_ports is {self.worker_ports!r}; write a range from 1024 to 65535: 20000-20099")
        if len(self.ports) < LEAST_PORTS:
            raise ValueError(f"worker_ports holds {len(self.ports)} ports; a worker needs up to {LEAST_PORTS}")
        return self

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if self.tls_dir and not self.tls:
            raise ValueError("tls_dir is of no effect while tls is off; set cluster.tls: on")
        return self


class PlannerSettings(Section):
    """Autoscaling: how many workers of each role the load needs."""

    mode: PlannerMode = setting(
        "off",
        "auto: Serve starts and drains workers as the planner decides, within the bounds below; off: cluster.prefill "
        "and cluster.decode are the counts.",
    )
    profile: str | None = setting(
        None,
        "A worker's speed: a ready-made profile's name, or a file of `kvrelay profile --fit` at the same path on "
        "every node; default: learned from the workers' reports.",
    )
    history: str | None = setting(
        None,
        "A CSV file of past days' load, read where Serve's controller runs: columns time and requests. Their daily "
        "pattern is expected from the start; default: learned while the cluster runs.",
    )
    ttft_s: float | None = setting(
        None, "TTFT target to plan for; default: slo.ttft_s, else 5.", unit="s", gt=0, allow_inf_nan=False
    )
    tpot_s: float | None = setting(
        None, "TPOT target to plan for; default: slo.tpot_s, else 0.1.", unit="s", gt=0, allow_inf_nan=False
    )
    min_prefill: int = setting(1, "Fewest prefill workers.", ge=1)
    max_prefill: int = setting(4, "Most prefill workers.", ge=1)
    min_decode: int = setting(1, "Fewest decode workers.", ge=1)
    max_decode: int = setting(4, "Most decode workers.", ge=1)
    max_workers: int | None = setting(None, "Most workers of both roles together; default: no limit.", ge=2)
    switch_roles: bool = setting(
        True,
        "A role that needs more workers first takes those that the other role has to spare: they change their roles in "
        "place, before workers are started. false: roles stay as deployed.",
    )
    scale_down_delay_s: float = setting(
        300.0,
        "How long fewer workers must have been enough before scaling down, and the shortest time between two such "
        "changes; a count reverses at most 2 x 3600 / scale_down_delay_s + 3 times an hour.",
        unit="s",
        ge=10,
        le=86400,
    )

    @field_validator("min_prefill", "max_prefill", "min_decode", "max_decode", mode="before")
    @classmethod
    def _check_not_none(cls, count: object, field: ValidationInfo) -> object:
        return _not_none(count, field)

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.min_prefill > self.max_prefill or self.min_decode > self.max_decode:
            raise ValueError("a minimum is above its maximum")
        if self.max_workers is not None and self.max_workers < self.min_prefill + self.min_decode:
            raise ValueError("max_workers is below min_prefill + min_decode")
        return self
