"""An API server for the tests: the real REST paths, watches, Status errors and exec protocols, over TCP.

It runs in a thread with an event loop of its own, so that clients of any kind, and other processes, speak to
it. Faults are attributes that tests set.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import threading
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from aiohttp import web
from kubernetes_kubelet import Container
from kubernetes_protocol import (
    V4,
    V5,
    Json,
    Refusal,
    check_fields,
    check_pod,
    condition,
    feed,
    follow,
    line,
    now,
    selected,
)

TOKEN = "a-token"
_EVICTED = "The node was low on resource: ephemeral-storage. Threshold quantity: 1Gi, available: 0."


@dataclass
class Pod:
    body: Json
    container: Container | None = None
    kubelet: asyncio.Task[None] | None = None
    programs: set[asyncio.Task[None]] = field(default_factory=set)


class FakeCluster:
    """One namespace-agnostic cluster with one node. `with` starts and ends it."""

    def __init__(self, tls: tuple[Path, Path] | None = None) -> None:
        self._tls = tls
        self.port = 0
        self.pods: dict[tuple[str, str], Pod] = {}
        self.policies: dict[tuple[str, str], Json] = {}
        self.events: list[Json] = []
        self.requests: list[str] = []
        self._version = 100
        self._history: list[tuple[int, str, Json]] = []
        self._watching: set[asyncio.Event] = set()
        self._transports: set[asyncio.Transport | None] = set()
        # Faults
        self.protocols = [V5, V4]
        self.forbidden: set[tuple[str, str]] = set()
        """(verb, resource)."""
        self.refusals: list[tuple[str, Refusal]] = []
        """What to answer next requests of this method and path part, once each."""
        self.quota: int | None = None
        self.no_room = False
        self.bad_images: dict[str, tuple[str, str]] = {}
        """By image, the waiting reasons and messages."""
        self.pulls: dict[str, asyncio.Event] = {}
        """Images that aren't there before `pulled`."""
        self.forget_before = 0
        """Watches from before this version are 410."""
        self.node_dead = False
        self.lose_created = 0
        """So many created pods are answered with a closed connection."""

    # Running it

    def __enter__(self) -> FakeCluster:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="fake API server")
        self._thread.start()
        self.do(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self.do(self._end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def do(self, what: Coroutine[Any, Any, Any]) -> Any:
        """Runs something in the server's thread."""
        return asyncio.run_coroutine_threadsafe(what, self.loop).result(20)

    def stop(self) -> None:
        """The API goes away; its pods live on."""
        self.do(self._stop())

    def restart(self) -> None:
        self.do(self._listen())

    def pulled(self, image: str) -> None:
        self.loop.call_soon_threadsafe(self.pulls[image].set)

    def slow_pull(self, image: str) -> None:
        async def make() -> None:
            self.pulls[image] = asyncio.Event()

        self.do(make())

    def evict(self, name: str) -> None:
        self.do(self._evict(name))

    def kubeconfig(self, path: Path, **cluster: str) -> Path:
        scheme = "https" if self._tls else "http"
        where: Json = {"server": f"{scheme}://127.0.0.1:{self.port}", **cluster}
        context = {"cluster": "fake", "user": "me", "namespace": "boxes"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "fake", "cluster": where}],
            "users": [{"name": "me", "user": {"token": TOKEN}}],
            "contexts": [{"name": "fake", "context": context}],
            "current-context": "fake",
        }
        path.write_text(json.dumps(config))
        return path

    def bodies(self) -> list[Json]:
        return [pod.body for pod in self.pods.values()]

    def names(self) -> list[str]:
        return [name for _, name in self.pods]

    @property
    def version(self) -> int:
        return self._version

    def tick(self) -> None:
        """In its thread: something happens that watchers look at, elsewhere."""
        self._version += 1
        for woken in self._watching:
            woken.set()

    def add(self, body: Json) -> None:
        """In its thread: a pod that is there, with nothing in it."""
        about = body["metadata"]
        self.pods[about["namespace"], about["name"]] = pod = Pod(body)
        self._changed("ADDED", pod)

    async def _listen(self) -> None:
        app = web.Application(middlewares=[self._guard], client_max_size=1 << 24)
        space = "/api/v1/namespaces/{namespace}"
        app.router.add_post(f"{space}/pods", self._create)
        app.router.add_get(f"{space}/pods", self._list)
        app.router.add_get(f"{space}/pods/{{name}}", self._read)
        app.router.add_delete(f"{space}/pods/{{name}}", self._delete)
        app.router.add_get(f"{space}/pods/{{name}}/exec", self._exec)
        app.router.add_get(f"{space}/events", self._list_events)
        policies = "/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"
        app.router.add_get(f"{policies}/{{name}}", self._read_policy)
        app.router.add_post(policies, self._create_policy)
        self._runner = web.AppRunner(app, shutdown_timeout=0.05, access_log=None)
        await self._runner.setup()
        context = None
        if self._tls:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(*self._tls)
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=context)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        for transport in self._transports:
            if transport is not None:
                transport.abort()
        await self._runner.cleanup()

    async def _end(self) -> None:
        await self._stop()
        for pod in list(self.pods.values()):
            if pod.kubelet is not None:
                pod.kubelet.cancel()
            if pod.container is not None:
                await pod.container.end(0)
            await asyncio.gather(*pod.programs, return_exceptions=True)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        # Handshakes that a client broke off are known to the loop alone.
        for transport in list(self.loop._transports.values()):  # pyright: ignore
            transport.abort()
        for _ in range(5):  # transports that were closed say so in the next rounds
            await asyncio.sleep(0.002)

    # What guards every request

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Any]
    ) -> web.StreamResponse:
        transport = request.transport
        self._transports.add(transport)
        try:
            self.requests.append(f"{request.method} {request.path_qs}")
            scheme, _, token = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or token != TOKEN:
                raise Refusal(401, "Unauthorized", "Unauthorized")
            self._allow(request)
            for refusal in self.refusals:
                method, _, part = refusal[0].partition(" ")
                if request.method == method and part in request.path_qs:
                    self.refusals.remove(refusal)
                    raise refusal[1]
            return await handler(request)
        except Refusal as refusal:
            return refusal.response()
        finally:
            self._transports.discard(transport)

    def _allow(self, request: web.Request) -> None:
        parts = request.path.split("/namespaces/")[1].split("/")
        resource = "/".join([parts[1], *parts[3:]])
        verb = {"POST": "create", "DELETE": "delete"}.get(request.method, "")
        if not verb:
            verb = "get" if len(parts) > 2 else "list"
            if request.query.get("watch") in ("true", "True"):
                verb = "watch"
        if (verb, resource) in self.forbidden:
            name = f' "{parts[2]}"' if len(parts) > 2 else ""
            raise Refusal(
                403,
                "Forbidden",
                f'{resource}{name} is forbidden: User "me" cannot {verb} resource "{resource}" in '
                f'API group "" in the namespace "{parts[0]}"',
            )

    # Pods

    async def _create(self, request: web.Request) -> web.Response:
        body: Json = await request.json()
        space, name = request.match_info["namespace"], body["metadata"]["name"]
        check_pod(body)
        if (space, name) in self.pods:
            raise Refusal(409, "AlreadyExists", f'pods "{name}" already exists')
        if self.quota is not None and len(self.pods) >= self.quota:
            raise Refusal(
                403,
                "Forbidden",
                f'pods "{name}" is forbidden: exceeded quota: few, requested: pods=1, '
                f"used: pods={len(self.pods)}, limited: pods={self.quota}",
            )
        body["metadata"] |= {
            "namespace": space,
            "uid": str(uuid.uuid4()),
            "creationTimestamp": now(),
        }
        body["status"] = {"phase": "Pending", "qosClass": "Guaranteed"}
        pod = self.pods[space, name] = Pod(body)
        self._changed("ADDED", pod)
        pod.kubelet = asyncio.create_task(self._run(pod))
        if self.lose_created:
            self.lose_created -= 1
            assert request.transport is not None
            request.transport.abort()
        return web.json_response(body, status=201)

    async def _read(self, request: web.Request) -> web.Response:
        return web.json_response(self._pod(request).body)

    async def _delete(self, request: web.Request) -> web.Response:
        pod = self._pod(request)
        options: Json = await request.json() if request.can_read_body else {}
        uid = options.get("preconditions", {}).get("uid")
        if uid and uid != pod.body["metadata"]["uid"]:
            raise Refusal(409, "Conflict", f"the UID in the precondition ({uid}) does not match")
        grace = options.get("gracePeriodSeconds")
        if grace is None:
            grace = pod.body["spec"]["terminationGracePeriodSeconds"]
        if grace == 0:
            await self._vanish(pod, 0)
        elif "deletionTimestamp" not in pod.body["metadata"]:
            pod.body["metadata"]["deletionTimestamp"] = now()
            pod.body["metadata"]["deletionGracePeriodSeconds"] = grace
            self._changed("MODIFIED", pod)
            if not self.node_dead:
                task = asyncio.create_task(self._vanish(pod, grace))
                pod.programs.add(task)
                task.add_done_callback(pod.programs.discard)
        return web.json_response(pod.body)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        query, space = request.query, request.match_info["namespace"]
        selector = query.get("labelSelector", "")
        if query.get("watch") in ("true", "True"):
            return await self._watch(request, selector)
        items = [
            pod.body
            for (where, _), pod in sorted(self.pods.items())
            if where == space and selected(pod.body, selector)
        ]
        about = {"resourceVersion": str(self._version)}
        if limit := int(query.get("limit", 0)):
            start = int(query.get("continue", 0))
            if start + limit < len(items):
                about["continue"] = str(start + limit)
            items = items[start : start + limit]
        return web.json_response(
            {"kind": "PodList", "apiVersion": "v1", "metadata": about, "items": items}
        )

    async def _watch(self, request: web.Request, selector: str) -> web.StreamResponse:
        seen = int(request.query["resourceVersion"])
        space = request.match_info["namespace"]
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        woken = asyncio.Event()
        self._watching.add(woken)
        try:
            async with asyncio.timeout(float(request.query.get("timeoutSeconds", 1800))):
                while True:
                    if seen < self.forget_before:
                        gone = {
                            "kind": "Status",
                            "status": "Failure",
                            "reason": "Expired",
                            "code": 410,
                            "message": f"too old resource version: {seen}",
                        }
                        await response.write(line({"type": "ERROR", "object": gone}))
                        break
                    for version, kind, body in self._history:
                        if version > seen and body["metadata"]["namespace"] == space:
                            seen = version
                            if selected(body, selector):
                                await response.write(line({"type": kind, "object": body}))
                    woken.clear()
                    await woken.wait()
        except TimeoutError:
            pass
        except ConnectionError:
            return response
        finally:
            self._watching.discard(woken)
        await response.write_eof()
        return response

    def _changed(self, kind: str, pod: Pod) -> None:
        self._version += 1
        pod.body["metadata"]["resourceVersion"] = str(self._version)
        self._history.append((self._version, kind, json.loads(json.dumps(pod.body))))
        for woken in self._watching:
            woken.set()

    def _pod(self, request: web.Request) -> Pod:
        name = request.match_info["name"]
        pod = self.pods.get((request.match_info["namespace"], name))
        if pod is None:
            raise Refusal(404, "NotFound", f'pods "{name}" not found')
        return pod

    # The kubelet

    async def _run(self, pod: Pod) -> None:
        body, spec = pod.body, pod.body["spec"]
        given = spec["containers"][0]
        image = given["image"]
        if self.no_room:
            said = "0/1 nodes are available: 1 Insufficient memory."
            body["status"]["conditions"] = [
                condition("PodScheduled", "False", "Unschedulable", said)
            ]
            self._changed("MODIFIED", pod)
            return
        body["status"]["conditions"] = [condition("PodScheduled", "True")]
        body["status"]["containerStatuses"] = [{"name": given["name"], "image": image, "state": {}}]
        self._state(pod, {"waiting": {"reason": "ContainerCreating"}})
        if image in self.bad_images:
            reason, message = self.bad_images[image]
            self._state(pod, {"waiting": {"reason": reason, "message": message}})
            return
        if image in self.pulls:
            await self.pulls[image].wait()
        env = {item["name"]: item["value"].replace("$$", "$") for item in given["env"]}
        command = [word.replace("$$", "$") for word in given["command"]]
        pod.container = Container(command, env, given["workingDir"])
        body["status"]["phase"] = "Running"
        self._state(pod, {"running": {"startedAt": now()}})
        ends = asyncio.get_running_loop().time() + spec["activeDeadlineSeconds"]
        while (  # noqa: ASYNC110 - another process's doing
            pod.container.running() and asyncio.get_running_loop().time() < ends
        ):
            await asyncio.sleep(0.02)
        if pod.container.running():
            self._fail(pod, "DeadlineExceeded", "Pod was active on the node longer than specified")
            await pod.container.end(0)
            return
        code = pod.container.process.returncode
        body["status"]["phase"] = "Failed" if code else "Succeeded"
        ended = {"exitCode": code, "reason": "Error" if code else "Completed", "finishedAt": now()}
        self._state(pod, {"terminated": ended})

    def _state(self, pod: Pod, state: Json) -> None:
        pod.body["status"]["containerStatuses"][0]["state"] = state
        self._changed("MODIFIED", pod)

    def _fail(self, pod: Pod, reason: str, message: str) -> None:
        pod.body["status"] |= {"phase": "Failed", "reason": reason, "message": message}
        pod.body["status"].pop("containerStatuses", None)
        self._changed("MODIFIED", pod)

    async def _evict(self, name: str) -> None:
        (pod,) = (pod for (_, known), pod in self.pods.items() if known == name)
        assert pod.kubelet is not None
        assert pod.container is not None
        pod.kubelet.cancel()
        self._fail(pod, "Evicted", _EVICTED)
        await pod.container.end(0)

    async def _vanish(self, pod: Pod, grace_s: float) -> None:
        if pod.kubelet is not None:
            pod.kubelet.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await pod.kubelet
        if pod.container is not None:
            await pod.container.end(grace_s)
        about = pod.body["metadata"]
        if self.pods.pop((about["namespace"], about["name"]), None) is not None:
            self._changed("DELETED", pod)

    # Programs

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        pod = self._pod(request)
        ready = pod.body["status"]["phase"] == "Running"
        if not ready or pod.container is None or not pod.container.running():
            raise Refusal(500, "InternalError", 'container not found ("sandbox")')
        # Over the wire to the container runtime, protobuf strings: UTF-8 or nothing.
        query = request.rel_url.raw_query_string.split("&")
        argv = [
            unquote(part[8:].replace("+", " "), errors="strict")
            for part in query
            if part.startswith("command=")
        ]
        asked = [p.strip() for p in request.headers["Sec-WebSocket-Protocol"].split(",")]
        if not set(asked) & set(self.protocols):
            raise Refusal(403, "Forbidden", f"none of the protocols {asked} is spoken here")
        response = web.WebSocketResponse(
            protocols=[p for p in self.protocols if p in asked], compress=False
        )
        await response.prepare(request)
        for channel in (0, 1, 2):  # what kubelets begin with
            await response.send_bytes(bytes([channel]))
        tty = request.query["tty"] == "true"
        program = await pod.container.start(argv, tty=tty)
        task = asyncio.create_task(feed(response, program))
        try:
            status = await follow(response, program)
            if not response.closed:
                await response.send_bytes(b"\3" + json.dumps(status).encode())
                await response.close()
        except (ConnectionError, RuntimeError):
            pass  # the client has gone; what it started lives on
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return response

    # The rest

    async def _list_events(self, request: web.Request) -> web.Response:
        name = request.query["fieldSelector"].removeprefix("involvedObject.name=")
        items = [e for e in self.events if e["involvedObject"]["name"] in (name, "*")]
        return web.json_response({"kind": "EventList", "apiVersion": "v1", "items": items})

    async def _read_policy(self, request: web.Request) -> web.Response:
        key = request.match_info["namespace"], request.match_info["name"]
        if key not in self.policies:
            raise Refusal(
                404, "NotFound", f'networkpolicies.networking.k8s.io "{key[1]}" not found'
            )
        return web.json_response(self.policies[key])

    async def _create_policy(self, request: web.Request) -> web.Response:
        body: Json = await request.json()
        check_fields(body, "V1NetworkPolicy")
        self.policies[request.match_info["namespace"], body["metadata"]["name"]] = body
        return web.json_response(body, status=201)
