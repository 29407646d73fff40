"""A hub on this machine, of one owner: so much of its protocol as huggingface_hub needs to upload and download models.

Large files come by LFS, in one request or in parts; what was sent lies in memory. Or by Xet: hf_xet itself then keeps
their chunks in a folder on this machine, and the hub has but their names.
"""

import base64
import hashlib
import json
import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

TOKEN = "hf_" + "Aa1Bb2Cc3Dd4" * 3
OWNER = "me"
_LARGE = (".safetensors", "tokenizer.json")
_REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"


@dataclass
class Repo:
    private: bool
    branches: dict = field(default_factory=dict)
    """name → commit"""
    commits: dict = field(default_factory=dict)
    """commit → (message, {path: bytes})"""

    def commit(self, branch, message, files):
        content = sorted((path, hashlib.sha1(data).hexdigest()) for path, data in files.items())
        name = hashlib.sha1(f"{branch} {len(self.commits)} {content}".encode()).hexdigest()
        self.commits[name] = (message, files)
        self.branches[branch] = name
        return name

    def at(self, revision):
        """(commit, its files); None where there is no such revision."""
        name = self.branches.get(revision, revision)
        return (name, self.commits[name][1]) if name in self.commits else None


class Hub:
    """Listens on a free port until it is closed. Its address is for HF_ENDPOINT."""

    def __init__(self, part=60_000, xet=None):
        """`xet` is the folder for chunks of Xet; LFS in parts of so many bytes without it."""
        self.xet = xet
        self.xet_hashes = {}
        """oid → what Xet knows an object by. The real hub learns it from the storage of Xet."""
        self.repos, self.objects, self.parts = {}, {}, {}
        self.sent = Counter()
        """How often the bytes of each object were sent, by its oid or by oid/part."""
        self.refusals = []
        self.held, self.free = threading.Event(), threading.Event()
        self.free.set()
        self.holds = lambda oid, number: False
        self.part = part
        self.role = "write"
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def environment(self, home):
        """For a process that goes to this hub, with its cache in a folder of its own."""
        return {"HF_ENDPOINT": self.address, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "0" if self.xet else "1",
                "HF_TOKEN": TOKEN, "HF_HOME": str(home)}  # fmt: skip

    def files(self, repo, revision="main"):
        return self.repos[repo].at(revision)[1]

    def refuse(self, method, path, status, said):
        """Answer requests like these with an error."""
        self.refusals.append((method, re.compile(path), status, said))

    def hold(self, oid, number):
        """Take a part of an object and do not answer, until `free` is set."""
        self.holds = lambda *part: part == (oid, number)
        self.held.clear()
        self.free.clear()

    def close(self):
        self.free.set()
        self._server.shutdown()
        self._server.server_close()


class ByXet(bytes):
    """In the place of a file's bytes: the oid of one that Xet keeps."""


def _sha256(data):
    return data.decode() if isinstance(data, ByXet) else hashlib.sha256(data).hexdigest()


class Refused(Exception):
    def __init__(self, status, said, code=""):
        self.status, self.said, self.code = status, said, code


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def _answer(self):
        address = urlsplit(self.path)
        path, self.query = unquote(address.path), parse_qs(address.query)
        self.body = self._read()
        try:
            for method, pattern, status, said in self.hub.refusals:
                if method == self.command and pattern.search(path):
                    raise Refused(status, said)
            for method, pattern, answer in _ROUTES:
                match = re.fullmatch(pattern, path)
                if match is not None and self.command in method.split():
                    return answer(self, **match.groupdict())
            raise Refused(404, f"there is nothing at {path}")
        except Refused as refused:
            headers = {"X-Error-Message": refused.said} | ({"X-Error-Code": refused.code} if refused.code else {})
            self._send(json.dumps({"error": refused.said}).encode(), refused.status, headers)

    def _read(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        pieces = []
        while size := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def _send(self, content, status=200, headers=None, kind="application/json"):
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _json(self, value, status=200):
        self._send(json.dumps(value).encode(), status)

    def _check_token(self):
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise Refused(401, "Invalid credentials in Authorization header")

    def _repo(self, name):
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and self.headers.get("Authorization") != f"Bearer {TOKEN}"):
            raise Refused(404, "Repository not found", "RepoNotFound")
        return repo

    def _at(self, repo, revision):
        found = self._repo(repo).at(revision)
        if found is None:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found

    # who, repositories, branches

    def whoami(self):
        self._check_token()
        self._json({"type": "user", "name": OWNER, "orgs": [], "auth": {"accessToken": {"role": self.hub.role}}})

    def create(self):
        self._check_token()
        asked = json.loads(self.body)
        owner = asked.get("organization") or OWNER
        if owner != OWNER:
            raise Refused(403, f'You don\'t have the rights to create a model under the namespace "{owner}"')
        name = f"{owner}/{asked['name']}"
        if name in self.hub.repos:
            raise Refused(409, "You already created this model repo")
        private = asked.get("visibility", "private" if asked.get("private") else "public") == "private"
        self.hub.repos[name] = repo = Repo(private)
        repo.commit("main", "initial commit", {".gitattributes": b"*.safetensors filter=lfs\n"})
        self._json({"url": f"{self.hub.address}/{name}", "name": name})

    def validate(self):
        head = re.match(r"---\n(.*?)\n---\n", json.loads(self.body)["content"], re.DOTALL)
        try:
            metadata = yaml.safe_load(head[1]) if head else None
        except yaml.YAMLError as error:
            return self._json({"errors": [{"message": str(error)}], "warnings": []}, 400)
        if metadata and metadata.get("license") == "no-such-licence":
            return self._json({"errors": [{"message": '"license" must be one of [apache-2.0, …]'}]}, 400)
        warnings = [] if metadata else [{"message": "empty or missing yaml metadata in repo card"}]
        self._json({"errors": [], "warnings": warnings})

    def info(self, repo, revision="main"):
        commit, files = self._at(repo, revision)
        siblings = [{"rfilename": path} for path in files]
        private = self.hub.repos[repo].private
        self._json({"id": repo, "modelId": repo, "sha": commit, "private": private, "siblings": siblings, "tags": []})

    def branch(self, repo, branch):
        self._check_token()
        commit, _ = self._at(repo, (json.loads(self.body or b"{}")).get("startingPoint", "main"))
        if branch in self.hub.repos[repo].branches:
            raise Refused(409, "Reference already exists")
        self.hub.repos[repo].branches[branch] = commit
        self._json({})

    def tree(self, repo, revision, path=""):
        _, files = self._at(repo, revision)
        inside = {name: data for name, data in files.items() if name.startswith(f"{path}/" if path else "")}
        if path and not inside:
            raise Refused(404, f"{path} does not exist on {revision}", "EntryNotFound")
        self._json([{"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in inside.items()])  # fmt: skip

    # upload

    def preupload(self, repo, revision):
        self._check_token()
        _, files = self._at(repo, revision)
        answers = []
        for file in json.loads(self.body)["files"]:
            large = file["path"].endswith(_LARGE)
            answer = {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            if file["path"] in files:
                data = files[file["path"]]
                answer["oid"] = _sha256(data) if large else hashlib.sha1(b"blob %d\0%b" % (len(data), data)).hexdigest()
            answers.append(answer)
        self._json({"files": answers})

    def batch(self, repo):
        self._check_token()
        self._repo(repo)
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            oid, size = wanted["oid"], wanted["size"]
            answer = {"oid": oid, "size": size}
            if oid not in self.hub.objects:
                href, header = f"{self.hub.address}/lfs/{oid}", {}
                if size > self.hub.part:
                    count = -(-size // self.hub.part)
                    header = {str(number): f"{href}/{number}" for number in range(1, count + 1)}
                    header["chunk_size"] = str(self.hub.part)
                answer["actions"] = {"upload": {"href": href, "header": header},
                                     "verify": {"href": f"{href}/verify"}}  # fmt: skip
            objects.append(answer)
        self._json({"transfer": "basic", "objects": objects})

    def put(self, oid, number=None):
        """The signed address of a storage: no token is sent there."""
        self.hub.sent[f"{oid}/{number}" if number else oid] += 1
        if self.hub.holds(oid, int(number or 0)):
            self.hub.held.set()
            self.hub.free.wait()
        if number:
            self.hub.parts[oid, int(number)] = self.body
        else:
            self._keep(oid, self.body)
        self._send(b"", headers={"ETag": f'"{hashlib.md5(self.body).hexdigest()}"'})

    def complete(self, oid):
        numbers = [part["partNumber"] for part in json.loads(self.body)["parts"]]
        self._keep(oid, b"".join(self.hub.parts[oid, number] for number in numbers))
        self._json({})

    def _keep(self, oid, data):
        if hashlib.sha256(data).hexdigest() != oid:
            raise Refused(400, "the bytes are not those of the object")
        self.hub.objects[oid] = data

    def verify(self, oid):
        wanted = json.loads(self.body)
        if len(self.hub.objects.get(oid, b"")) != wanted["size"]:
            raise Refused(404, "the object is not there")
        self._json({})

    def commit(self, repo, revision):
        self._check_token()
        _, before = self._at(repo, revision)
        files, message = dict(before), ""
        for line in self.body.splitlines():
            item = json.loads(line)
            kind, value = item["key"], item["value"]
            if kind == "header":
                message = value["summary"]
            elif kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                if value["oid"] not in self.hub.objects and not self.hub.xet:
                    raise Refused(400, f"{value['path']}: its object was not uploaded")
                files[value["path"]] = self.hub.objects.get(value["oid"], ByXet(value["oid"].encode()))
            elif kind == "deletedFile":
                del files[value["path"]]
        name = self.hub.repos[repo].commit(revision, message, files)
        url = f"{self.hub.address}/{repo}/commit/{name}"
        self._json({"success": True, "commitOid": name, "commitUrl": url, "hookOutput": ""})

    def xet_token(self, repo, kind, revision):
        if kind == "write":
            self._check_token()
        self._repo(repo)
        store = {"casUrl": f"local://{self.hub.xet}", "accessToken": "of-xet", "exp": 4_000_000_000}
        headers = dict(
            zip(("X-Xet-Cas-Url", "X-Xet-Access-Token", "X-Xet-Token-Expiration"), store.values(), strict=True)
        )
        self._send(json.dumps(store).encode(), headers={name: str(value) for name, value in headers.items()})

    # download

    def resolve(self, repo, revision, path):
        commit, files = self._at(repo, revision)
        if path not in files:
            raise Refused(404, f"{path} does not exist on {revision}", "EntryNotFound")
        data = files[path]
        headers = {"ETag": f'"{_sha256(data)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if isinstance(data, ByXet):
            xet_hash, size = self.hub.xet_hashes[_sha256(data)]
            route = f"{self.hub.address}/api/models/{repo}/xet-read-token/{commit}"
            headers |= {"X-Xet-Hash": xet_hash, "X-Xet-Refresh-Route": route, "X-Linked-Size": str(size),
                        "X-Linked-Etag": headers["ETag"]}  # fmt: skip
        self._send(data, headers=headers, kind="application/octet-stream")


_ROUTES = [
    ("GET", r"/api/whoami-v2", _Handler.whoami),
    ("POST", r"/api/repos/create", _Handler.create),
    ("POST", r"/api/validate-yaml", _Handler.validate),
    ("GET", rf"/api/models/{_REPO}", _Handler.info),
    ("GET", rf"/api/models/{_REPO}/revision/(?P<revision>.+)", _Handler.info),
    ("POST", rf"/api/models/{_REPO}/branch/(?P<branch>.+)", _Handler.branch),
    ("GET", rf"/api/models/{_REPO}/xet-(?P<kind>read|write)-token/(?P<revision>.+)", _Handler.xet_token),
    ("GET", rf"/api/models/{_REPO}/tree/(?P<revision>[^/]+)(?:/(?P<path>.+))?", _Handler.tree),
    ("POST", rf"/api/models/{_REPO}/preupload/(?P<revision>.+)", _Handler.preupload),
    ("POST", rf"/api/models/{_REPO}/commit/(?P<revision>.+)", _Handler.commit),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", _Handler.batch),
    ("PUT", r"/lfs/(?P<oid>\w{64})(?:/(?P<number>\d+))?", _Handler.put),
    ("POST", r"/lfs/(?P<oid>\w{64})/verify", _Handler.verify),
    ("POST", r"/lfs/(?P<oid>\w{64})", _Handler.complete),
    ("GET HEAD", rf"/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _Handler.resolve),
]
