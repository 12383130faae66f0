"""Envoy's documents, rendered from splits. Pure: data in, data out.

Three documents with one writer each: the bootstrap never changes while Envoy runs (a changed listener cuts its
streams), `cds.json` lists clusters and `rds.json` holds every weight of the gateway, so that one rename(2) moves
traffic. Every constant here that differs from Envoy's default was found necessary by a failure.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import quote

from gates.router import CANDIDATE, FALLBACK, STABLE, WHOLE_BP, Arm, Split

JsonObject = dict[str, Any]

TYPE: Final = "type.googleapis.com/envoy."
ROUTES: Final = "release"
"""Name of the one route configuration."""
REVISION_HEADER: Final = "x-release-rev"
ARM_HEADER: Final = "x-release-arm"
"""The arm that a request was assigned to; while the candidate cannot be reached, stable serves in its name."""
PIN_HEADER: Final = "x-release-pin"
PROBE_PATH: Final = "/.well-known/sluicegate"
API: Final = "/v1/"
"""All of an engine that callers reach: beside it, engines have routes that change what they serve."""
METADATA: Final = "sluicegate"
LOG_FILE: Final = "access.jsonl"
ADMIN_SOCKET: Final = "admin.sock"
XDS_FOLDER: Final = "xds"

_UNLIMITED: Final = {
    "thresholds": [
        {"max_connections": 100_000, "max_pending_requests": 100_000, "max_requests": 100_000, "max_retries": 100_000}
    ]
}
_NO_TIMEOUT: Final = {"timeout": "0s", "idle_timeout": "0s"}
"""The default of 15 s would cut every longer stream, with status 200."""
_LOG: Final = {
    "ts": "%START_TIME(%s.%6f)%",
    "rid": "%REQ(X-REQUEST-ID)%",
    "method": "%REQ(:METHOD)%",
    "path": "%PATH(NQ)%",
    "target": f"%METADATA(ROUTE:{METADATA}:target)%",
    "rev": f"%METADATA(ROUTE:{METADATA}:rev)%",
    "route": "%ROUTE_NAME%",
    "code": "%RESPONSE_CODE%",
    "details": "%RESPONSE_CODE_DETAILS%",
    "flags": "%RESPONSE_FLAGS%",
    "assigned": "%UPSTREAM_CLUSTER_RAW%",
    "served": "%UPSTREAM_HOST%",
    "attempts": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
    "type": "%RESP(CONTENT-TYPE)%",
    "in": "%BYTES_RECEIVED%",
    "out": "%BYTES_SENT%",
    # Response headers are no first token: engines flush them at once.
    "headers_us": "%COMMON_DURATION(DS_RX_BEG:US_RX_BEG:us)%",
    "ttft_us": "%COMMON_DURATION(DS_RX_BEG:US_RX_BODY_BEG:us)%",
    "duration_ms": "%DURATION%",
}


def bootstrap(host: str, port: int) -> JsonObject:
    """Return the document that Envoy starts with. Its paths are relative: Envoy runs in the gateway's directory.

    Args:
        host: IP address to listen on.
        port: TCP port to listen on.
    """
    return {
        "node": {"id": "sluicegate", "cluster": "sluicegate"},
        # A unix socket with mode 0600: whoever reaches the admin interface can stop Envoy.
        "admin": {"address": {"pipe": {"path": ADMIN_SOCKET, "mode": 0o600}}},
        "dynamic_resources": {"cds_config": _files("cds.json")},
        # No admin layer: a value set by hand would outrank the files and be invisible in them.
        "layered_runtime": {"layers": [{"name": "static", "static_layer": {}}]},
        "overload_manager": {
            "resource_monitors": [
                {
                    "name": "envoy.resource_monitors.global_downstream_max_connections",
                    "typed_config": {
                        "@type": TYPE + "extensions.resource_monitors.downstream_connections.v3"
                        ".DownstreamConnectionsConfig",
                        "max_active_downstream_connections": 20_000,
                    },
                }
            ]
        },
        "static_resources": {
            "listeners": [
                {
                    "name": "gateway",
                    "address": {"socket_address": {"address": host, "port_value": port}},
                    # With it a second Envoy on the same port would silently take half of the traffic.
                    "enable_reuse_port": False,
                    "filter_chains": [
                        {
                            "filters": [
                                {
                                    "name": "envoy.filters.network.http_connection_manager",
                                    "typed_config": _connection_manager(),
                                }
                            ]
                        }
                    ],
                }
            ]
        },
    }


def _files(name: str) -> JsonObject:
    # No watched_directory: with it, every rename in the folder would make Envoy read both documents again.
    return {"resource_api_version": "V3", "path_config_source": {"path": f"{XDS_FOLDER}/{name}"}}


def _connection_manager() -> JsonObject:
    return {
        "@type": TYPE + "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gw",
        "rds": {"route_config_name": ROUTES, "config_source": _files("rds.json")},
        "stream_idle_timeout": "0s",  # the default of 5 min cuts a silent prefill
        "request_timeout": "0s",
        "request_headers_timeout": "30s",
        "common_http_protocol_options": {"idle_timeout": "3600s"},
        "normalize_path": True,  # `/a@prod/../b@prod/` is b's, before routes are matched
        "path_with_escaped_slashes_action": "REJECT_REQUEST",  # an engine may take %2F for a slash
        "generate_request_id": True,
        "preserve_external_request_id": True,
        "always_set_request_id_in_response": True,
        "server_name": "sluicegate",
        "local_reply_config": {"mappers": _error_bodies()},
        "access_log": [
            {
                "name": "envoy.access_loggers.file",
                "typed_config": {
                    "@type": TYPE + "extensions.access_loggers.file.v3.FileAccessLog",
                    "path": LOG_FILE,
                    "log_format": {"json_format": dict(_LOG)},
                },
            }
        ],
        "http_filters": [
            {
                # Clients must not turn retries and timeouts back on. Removing these headers in a route is too late.
                "name": "strip",
                "typed_config": {
                    "@type": TYPE + "extensions.filters.http.header_mutation.v3.HeaderMutation",
                    "mutations": {"request_mutations": [{"remove_on_match": {"key_matcher": {"prefix": "x-envoy-"}}}]},
                },
            },
            {
                "name": "envoy.filters.http.router",
                "typed_config": {
                    "@type": TYPE + "extensions.filters.http.router.v3.Router",
                    "suppress_envoy_headers": True,
                },
            },
        ],
    }


def _error_bodies() -> list[JsonObject]:
    """Return how Envoy's own answers read: the error object of the OpenAI API."""

    def body(code: str, kind: str) -> JsonObject:
        error = {"message": "%LOCAL_REPLY_BODY%", "type": kind, "param": None, "code": code}
        return {"json_format": {"error": error}, "content_type": "application/json"}

    def status(operator: str, value: int) -> JsonObject:
        comparison = {"op": operator, "value": {"default_value": value, "runtime_key": "unused"}}
        return {"status_code_filter": {"comparison": comparison}}

    return [
        {"filter": status("EQ", 404), "body_format_override": body("target_not_found", "invalid_request_error")},
        {
            "filter": {"response_flag_filter": {}},
            "body_format_override": body("%RESPONSE_CODE_DETAILS%", "server_error"),
        },
        {"filter": status("EQ", 503), "body_format_override": body("target_not_serving", "server_error")},
        {"filter": status("GE", 500), "body_format_override": body("%RESPONSE_CODE_DETAILS%", "server_error")},
        {
            "filter": status("GE", 400),
            "body_format_override": body("%RESPONSE_CODE_DETAILS%", "invalid_request_error"),
        },
    ]


def clusters(version: str, arms: Iterable[tuple[Arm, Arm | None]]) -> JsonObject:
    """Return `cds.json`.

    Args:
        version: shown by Envoy as the version in force.
        arms: each arm with the arm that takes over while it cannot be reached. Repeats are harmless.
    """
    found: dict[str, JsonObject] = {}
    for arm, fallback in arms:
        found[arm.cluster] = _cluster(arm)
        if fallback is not None:
            name = _with_fallback(arm, fallback)
            found[name] = _aggregate(name, [arm.cluster, fallback.cluster])
    return {"version_info": version, "resources": [found[name] for name in sorted(found)]}


def arms_of(splits: Iterable[Split]) -> list[tuple[Arm, Arm | None]]:
    """Return what `clusters` takes: every arm of some splits, a candidate with its stable arm behind it."""
    return [(arm, split.arm(STABLE) if arm.name == CANDIDATE else None) for split in splits for arm in split.arms]


def _with_fallback(arm: Arm, fallback: Arm) -> str:
    return f"{arm.cluster}{FALLBACK}{fallback.cluster}"


def _address(arm: Arm) -> JsonObject:
    host, _, port = arm.address.rpartition(":")
    return {"socket_address": {"address": host.strip("[]"), "port_value": int(port)}}


def _cluster(arm: Arm) -> JsonObject:
    """Return the cluster of one replica. It depends on the arm's cluster and address only: a name never changes."""
    return {
        "@type": TYPE + "config.cluster.v3.Cluster",
        "name": arm.cluster,
        # A dot would end the cluster's name in the tags that Prometheus sees.
        "alt_stat_name": arm.cluster.replace(".", "_"),
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {
            "cluster_name": arm.cluster,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(arm)}}]}],
        },
        "circuit_breakers": _UNLIMITED,
        # A busy engine may answer late; a dead one is found by connecting, not by this.
        "health_checks": [
            {
                "timeout": "3s",
                "interval": "1s",
                "no_traffic_interval": "1s",
                "unhealthy_threshold": 3,
                "healthy_threshold": 1,
                "http_health_check": {"path": "/health"},
            }
        ],
        "outlier_detection": {
            "consecutive_5xx": 5,
            "consecutive_gateway_failure": 5,
            "enforcing_consecutive_gateway_failure": 100,
            "enforcing_success_rate": 0,
            "enforcing_failure_percentage": 0,
            "interval": "1s",
            "base_ejection_time": "10s",
            "max_ejection_percent": 100,
            # By default one passing /health brings back a host that fails every request.
            "successful_active_health_check_uneject_host": False,
        },
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": TYPE + "extensions.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {"http_protocol_options": {}},
                # One request a connection: llama.cpp promises keep-alive and closes after every stream all the same,
                # and a request that meets a closing connection is answered 503.
                "common_http_protocol_options": {"max_requests_per_connection": 1},
            }
        },
    }


def _aggregate(name: str, members: list[str]) -> JsonObject:
    return {
        "@type": TYPE + "config.cluster.v3.Cluster",
        "name": name,
        "alt_stat_name": name.replace(".", "_"),
        "connect_timeout": "1s",
        "lb_policy": "CLUSTER_PROVIDED",
        # Without it a lone unhealthy candidate is used all the same. Stable alone keeps Envoy's default: when the
        # only host looks ill, trying it is better than refusing everyone.
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        # Retries are counted against this cluster: the default of 3 turns failover into 503s.
        "circuit_breakers": _UNLIMITED,
        "cluster_type": {
            "name": "envoy.clusters.aggregate",
            "typed_config": {"@type": TYPE + "extensions.clusters.aggregate.v3.ClusterConfig", "clusters": members},
        },
    }


def routes(version: str, splits: Iterable[Split], *, pins: bool) -> JsonObject:
    """Return `rds.json`: every weight of the gateway.

    Args:
        version: shown by Envoy as the version in force.
        splits: one a target.
        pins: whether `x-release-pin: candidate` reaches the candidate whatever its weight.
    """
    found = [route for split in sorted(splits, key=lambda each: each.target) for route in _target_routes(split, pins)]
    unknown = {
        "name": "unknown",
        "match": {"prefix": "/"},
        "direct_response": {
            "status": 404,
            "body": {"inline_string": "No such target. Paths start with /<name>@<environment>/v1/."},
        },
    }
    return {
        "version_info": version,
        "resources": [
            {
                "@type": TYPE + "config.route.v3.RouteConfiguration",
                "name": ROUTES,
                # Else a route to a cluster that is not there is taken and answers 503.
                "validate_clusters": True,
                "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [*found, unknown]}],
            }
        ],
    }


def _target_routes(split: Split, pins: bool) -> list[JsonObject]:
    found: list[JsonObject] = []
    for prefix in dict.fromkeys((f"/{split.target}", f"/{quote(split.target)}")):
        common = {
            "metadata": {
                "filter_metadata": {METADATA: {"target": split.target, "rev": str(split.revision)}},
            },
        }
        found.append(
            {
                "name": "probe",
                "match": {"path": prefix + PROBE_PATH},
                "direct_response": {"status": 200, "body": {"inline_string": f"{split.target} {split.revision}\n"}},
                "response_headers_to_add": [_header(REVISION_HEADER, str(split.revision))],
                **common,
            }
        )
        candidate = split.arm(CANDIDATE)
        if pins and candidate is not None:
            match = {"prefix": prefix + API, "headers": [{"name": PIN_HEADER, "string_match": {"exact": CANDIDATE}}]}
            forward = _forward(split, {"cluster": candidate.cluster})
            forward["response_headers_to_add"].append(_header(ARM_HEADER, CANDIDATE))
            found.append({"name": "pin", "match": match, **forward, **common})
        main = {"name": "split", **_forward(split, _weighted(split))} if split.arms else _idle(split)
        found.append({"match": {"prefix": prefix + API}, **main, **common})
    return found


def _header(name: str, value: str) -> JsonObject:
    return {"header": {"key": name, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}


def _forward(split: Split, destination: JsonObject) -> JsonObject:
    return {
        "route": {"prefix_rewrite": API, **_NO_TIMEOUT, **destination},
        "response_headers_to_add": [_header(REVISION_HEADER, str(split.revision))],
    }


def _weighted(split: Split) -> JsonObject:
    stable = split.arm(STABLE)
    entries = []
    for arm in split.arms:
        if arm.weight_bp:
            name = _with_fallback(arm, stable) if arm.name == CANDIDATE and stable is not None else arm.cluster
            headers = [_header(ARM_HEADER, arm.name)]
            entries.append({"name": name, "weight": arm.weight_bp, "response_headers_to_add": headers})
    return {
        "weighted_clusters": {"clusters": entries},
        # connect-failure only: such a request never reached an engine, so nothing is generated twice.
        # previous_priorities moves the one retry from the candidate to stable.
        "retry_policy": {
            "retry_on": "connect-failure",
            "num_retries": 1,
            "retry_priority": {
                "name": "envoy.retry_priorities.previous_priorities",
                "typed_config": {
                    "@type": TYPE + "extensions.retry.priority.previous_priorities.v3.PreviousPrioritiesConfig",
                    "update_frequency": 1,
                },
            },
        },
    }


def _idle(split: Split) -> JsonObject:
    message = f"The target {split.target} serves nothing now: no release of it is live."
    return {
        "name": "idle",
        "direct_response": {"status": 503, "body": {"inline_string": message}},
        "response_headers_to_add": [_header(REVISION_HEADER, str(split.revision)), _header("retry-after", "5")],
    }


def cluster_names(document: Mapping[str, Any]) -> set[str]:
    """Return the names of the clusters in a `cds.json`."""
    return {str(each["name"]) for each in document["resources"]}


def check(clusters_document: Mapping[str, Any], routes_document: Mapping[str, Any]) -> None:
    """Refuse documents that Envoy would take and then answer 503 or 404 with.

    Raises:
        ValueError: a route names a cluster that is not there, weights do not sum to 10,000, or the catch-all
            route is missing.
    """
    known = cluster_names(clusters_document)
    for cluster in clusters_document["resources"]:
        members = cluster.get("cluster_type", {}).get("typed_config", {}).get("clusters", [])
        if ghosts := set(members) - known:
            raise ValueError(f"cluster {cluster['name']} has members that do not exist: {sorted(ghosts)}")
    found = routes_document["resources"][0]["virtual_hosts"][0]["routes"]
    if not found or found[-1]["match"] != {"prefix": "/"}:
        raise ValueError("the last route does not catch what no target matches")
    for route in found:
        action = route.get("route")
        if action is None:
            continue
        weighted = action.get("weighted_clusters", {}).get("clusters")
        entries = weighted if weighted is not None else [{"name": action["cluster"], "weight": WHOLE_BP}]
        if sum(entry["weight"] for entry in entries) != WHOLE_BP:
            raise ValueError(f"the weights of {route['match']['prefix']} do not sum to {WHOLE_BP}")
        if ghosts := {entry["name"] for entry in entries} - known:
            raise ValueError(f"{route['match']['prefix']} names clusters that do not exist: {sorted(ghosts)}")


def flattened(boot: JsonObject, clusters_document: JsonObject, routes_document: JsonObject) -> JsonObject:
    """Return one static document of all three, which `envoy --mode validate` can check without running."""
    listener = boot["static_resources"]["listeners"][0]
    chain = listener["filter_chains"][0]["filters"][0]
    manager = {key: value for key, value in chain["typed_config"].items() if key != "rds"}
    manager["route_config"] = {k: v for k, v in routes_document["resources"][0].items() if k != "@type"}
    static = {**listener, "filter_chains": [{"filters": [{**chain, "typed_config": manager}]}]}
    plain = [{k: v for k, v in each.items() if k != "@type"} for each in clusters_document["resources"]]
    return {
        "node": boot["node"],
        "overload_manager": boot["overload_manager"],
        "static_resources": {"listeners": [static], "clusters": plain},
    }
