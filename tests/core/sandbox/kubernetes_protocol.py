"""What the API server of the tests says and takes: Status objects, pods without mistakes, exec's channels."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from datetime import UTC, datetime
from typing import Any

from aiohttp import WSMsgType, web
from kubernetes.client import ApiClient
from kubernetes_kubelet import Program

V5, V4 = "v5.channel.k8s.io", "v4.channel.k8s.io"
_LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_QUANTITY = re.compile(r"[0-9.]+(m|Ki|Mi|Gi)?")
Json = dict[str, Any]


class Refusal(Exception):
    def __init__(self, code: int, reason: str, message: str, after: str = "") -> None:
        super().__init__(message)
        self.code, self.reason, self.after = code, reason, after

    def response(self) -> web.Response:
        status = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            "code": self.code,
        }
        headers = {"Retry-After": self.after} if self.after else {}
        return web.json_response(status, status=self.code, headers=headers)


async def feed(response: web.WebSocketResponse, program: Program) -> None:
    async for message in response:
        if message.type is not WSMsgType.BINARY:
            continue
        channel, data = message.data[0], message.data[1:]
        if channel == 0:
            await program.write(data)
        elif channel == 4:
            program.resize(json.loads(data))
        elif channel == 255 and response.ws_protocol == V5 and data == b"\0":
            program.close_input()
    program.close_input()


async def follow(response: web.WebSocketResponse, program: Program) -> Json:
    never_ran = False

    async def copy(channel: int) -> None:
        nonlocal never_ran
        while data := await program.read(channel):
            if data.startswith(b"setsid: failed to execute"):
                never_ran = True
            elif not response.closed:
                with contextlib.suppress(ConnectionError, RuntimeError):
                    await response.send_bytes(bytes([channel]) + data)

    await asyncio.gather(copy(1), copy(2))
    if response.ws_protocol == V5 and not response.closed:
        await response.send_bytes(b"\xff\1")  # this side may close its channels, too
    code = await program.exit_code()
    if never_ran:
        said = "OCI runtime exec failed: executable file not found in $PATH: unknown"
        return _status("InternalError", said, {})
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    said = f"command terminated with non-zero exit code: exit status {code}"
    return _status(
        "NonZeroExitCode", said, {"causes": [{"reason": "ExitCode", "message": str(code)}]}
    )


def _status(reason: str, message: str, details: Json) -> Json:
    said = {"status": "Failure", "reason": reason, "message": message, "details": details}
    return {"metadata": {}} | said


def check_fields(body: Json, kind: str) -> None:
    """Strict, by the official client's own models: nothing unknown, nothing missing."""

    class Given:
        data = json.dumps(body)

    made = ApiClient().deserialize(json.dumps(body), kind, "application/json")
    back = ApiClient().sanitize_for_serialization(made)
    if back != body:
        raise Refusal(422, "Invalid", f"unknown fields: {body} is read as {back}")


def check_pod(body: Json) -> None:
    check_fields(body, "V1Pod")
    for value in body["metadata"]["labels"].values():
        if not _LABEL.fullmatch(value):
            raise Refusal(422, "Invalid", f"metadata.labels: Invalid value: {value!r}")
    for container in body["spec"]["containers"]:
        for kind in ("limits", "requests"):
            for value in container["resources"][kind].values():
                if not _QUANTITY.fullmatch(value):
                    raise Refusal(422, "Invalid", f"resources.{kind}: Invalid value: {value!r}")


def selected(body: Json, selector: str) -> bool:
    labels = body["metadata"].get("labels", {})
    name, equals, value = selector.partition("=")
    return not selector or (labels.get(name) == value if equals else name in labels)


def condition(kind: str, status: str, reason: str = "", message: str = "") -> Json:
    made = {"type": kind, "status": status, "lastTransitionTime": now()}
    return made | {k: v for k, v in (("reason", reason), ("message", message)) if v}


def line(event: Json) -> bytes:
    return json.dumps(event).encode() + b"\n"


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
