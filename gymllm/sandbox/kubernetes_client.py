"""The official client, as little typed as it is: its configuration, calls and watch; its errors as one.

Everything here blocks: call it in threads.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false
# The packages have no stubs, or half of them; what leaves this module has types.

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import urllib3
from kubernetes import client, config, watch
from kubernetes.stream import ws_client
from websocket import WebSocket, WebSocketBadStatusException, WebSocketException

from gymllm.errors import SandboxStartError
from gymllm.sandbox.kubernetes import KubernetesHost
from gymllm.sandbox.kubernetes_pod import Json

CALL_TIMEOUT_S = (5.0, 30.0)
_CONNECT_TIMEOUT_S = 15.0
_WATCH_S = 60
_PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
_IN_POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_TRANSIENT = (0, 408, 429, 500, 502, 503, 504)

Response = urllib3.HTTPResponse
Call = Callable[..., object]


class ApiError(Exception):
    """What the API answered, other than yes. Never leaves the modules of this kind."""

    def __init__(
        self, status: int, reason: str, message: str, retry_after_s: float | None = None
    ) -> None:
        super().__init__(f"{message} ({status} {reason})" if status else message)
        self.status, self.reason, self.retry_after_s = status, reason, retry_after_s

    @property
    def passes(self) -> bool:
        """It may be different in a moment."""
        # 409 Conflict: two writers met, at a quota, say. 409 AlreadyExists is another matter.
        return self.status in _TRANSIENT or (self.status == 409 and self.reason == "Conflict")


class Api:
    """How to reach one cluster, and a namespace in it."""

    def __init__(self, host: KubernetesHost) -> None:
        self.configuration, self.namespace = _configured(host)
        made = client.ApiClient(self.configuration)
        self.core, self.networking = client.CoreV1Api(made), client.NetworkingV1Api(made)

    def pod_events(
        self, selector: str, version: str, opened: Callable[[Response], None]
    ) -> Iterator[Json]:
        """The official watch, from a version on, for a minute.

        Args:
            selector: Of labels.
            version: Of the list of pods that is known.
            opened: Is given the response before it is read; `shutdown` of it ends the watch.
        """

        def watched(**options: object) -> Response:
            options.pop("_preload_content")
            timeout = (CALL_TIMEOUT_S[0], _WATCH_S + 15.0)
            response = request(
                self.core.list_namespaced_pod,
                self.namespace,
                label_selector=selector,
                _request_timeout=timeout,
                **options,
            )
            opened(response)
            return response

        # `watched` names no type: events come as they are, which costs a tenth of the time.
        stream = cast("Callable[..., Iterator[Json]]", watch.Watch().stream)
        return stream(watched, resource_version=version, timeout_seconds=_WATCH_S)

    def connect(self, path: str) -> WebSocket:
        """Opens a WebSocket.

        Raises:
            ApiError: The API said no, or could not be reached.
        """
        configuration = self.configuration
        url = cast("str", ws_client.get_websocket_url(configuration.host + path))
        header: dict[str, str] = {}
        for setting in cast("dict[str, dict[str, str]]", configuration.auth_settings()).values():
            header[setting["key"]] = setting["value"]
        options: dict[str, Any] = {"header": header, "timeout": _CONNECT_TIMEOUT_S}
        options["subprotocols"] = list(_PROTOCOLS)
        if configuration.proxy or configuration.proxy_headers:
            options = ws_client.websocket_proxycare(options, configuration, url, header)
        tls: dict[str, object] = {}
        if url.startswith("wss:"):
            tls["context"] = _tls(configuration)
            if configuration.tls_server_name:
                tls["server_hostname"] = configuration.tls_server_name
        made = WebSocket(sslopt=tls, enable_multithread=False)
        try:
            made.connect(url, **options)
        except WebSocketBadStatusException as error:
            made.shutdown()
            headers = cast("dict[str, str]", error.resp_headers or {})
            after = {"Retry-After": headers.get("retry-after", "")}
            raise api_error(error.status_code, "", error.resp_body, after) from None
        except (WebSocketException, OSError) as error:
            made.shutdown()
            raise ApiError(0, "", f"the API can't be reached: {error}") from error
        return made


def request(call: Call, *args: object, **options: object) -> Response:
    """One call, its answer not read yet.

    Raises:
        ApiError: Whatever went wrong.
    """
    options.setdefault("_request_timeout", CALL_TIMEOUT_S)
    try:
        answer = call(*args, **options, _preload_content=False)
    except client.ApiException as error:  # what versions before 37 raise by themselves
        headers = cast("Mapping[str, str]", error.headers or {})
        raise api_error(int(error.status or 0), str(error.reason), error.body, headers) from None
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise ApiError(0, "", f"the API can't be reached: {error}") from error
    response = cast("Response", answer)
    if response.status >= 300:
        raise api_error(response.status, str(response.reason), response.data, response.headers)
    return response


def fetch(call: Call, *args: object, **options: object) -> Json:
    """One call and its answer.

    Raises:
        ApiError: Whatever went wrong.
    """
    response = request(call, *args, **options)
    try:
        return cast("Json", json.loads(response.data))
    except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
        raise ApiError(0, "", f"the API's answer broke off: {error}") from error
    finally:
        response.release_conn()


def api_error(status: int, reason: str, body: object, headers: Mapping[str, str]) -> ApiError:
    """Reads the Status object that API servers answer with."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else str(body or "")
    message = text.strip() or reason
    with suppress(ValueError):
        said = json.loads(text)
        if isinstance(said, dict):
            message = str(said.get("message") or message)
            reason = str(said.get("reason") or reason)
    after = headers.get("Retry-After", "")
    return ApiError(status, reason, message, float(after) if after.isdigit() else None)


def _configured(host: KubernetesHost) -> tuple[client.Configuration, str]:
    made = client.Configuration()
    path = str(host.kubeconfig) if host.kubeconfig is not None else None
    variable = os.environ.get("KUBECONFIG")
    try:
        if path or host.context or variable or Path("~/.kube/config").expanduser().exists():
            path = path or variable
            config.load_kube_config(path, host.context, client_configuration=made)
            contexts, current = cast(
                "tuple[list[dict[str, Any]], dict[str, Any]]",
                config.list_kube_config_contexts(path),
            )
            chosen = {context["name"]: context for context in contexts}.get(
                host.context or "", current
            )
            namespace = chosen["context"].get("namespace") or "default"
        else:
            config.load_incluster_config(client_configuration=made)
            namespace = _IN_POD_NAMESPACE.read_text().strip()
    except (config.ConfigException, OSError) as error:
        raise SandboxStartError(
            f"kubernetes: no cluster is configured: {error} Give KubernetesHost(kubeconfig=..., "
            "context=...), set KUBECONFIG, or run in a pod with a service account."
        ) from error
    made.retries = False  # pyright: ignore[reportAttributeAccessIssue]  ours hear what the API says
    made.connection_pool_maxsize = host.calls_at_once
    return made, host.namespace or str(namespace)


def _tls(configuration: client.Configuration) -> ssl.SSLContext:
    authority = cast("str | bytes | None", getattr(configuration, "ca_cert_data", None))  # since 37
    made = ssl.create_default_context(cafile=configuration.ssl_ca_cert, cadata=authority)
    if configuration.assert_hostname is False or not configuration.verify_ssl:
        made.check_hostname = False
    if not configuration.verify_ssl:
        made.verify_mode = ssl.CERT_NONE
    if configuration.cert_file:
        made.load_cert_chain(configuration.cert_file, configuration.key_file)
    return made
