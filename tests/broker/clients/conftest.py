"""Real clients against a real broker: processes of their own on free ports of this machine."""

import base64
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import bcrypt
import jwt
import pytest

from duelog import DelayedStore, Policies
from tests.broker.security.certificates import write_pair
from tests.ports import free_port

HERE = Path(__file__).parent
LACKING = 77
"""The exit status of a scenario that the client's version cannot do."""

SCENARIO_S = 180
START_S = 90

_SERVE = "from duelog.tools.cli.main import main; main()"


class ServedStore:
    """`duelog serve` on a directory."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        """settings: of its file, as TOML has them."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.settings = settings
        self.port, self.tls_port = settings.get("brokerServicePort") or free_port(), free_port()
        self.url = f"pulsar://127.0.0.1:{self.port}"
        self.tls_url = f"pulsar+ssl://localhost:{self.tls_port}"
        shown = {"brokerServicePort": self.port, "brokerServicePortTls": self.tls_port, **settings}
        lines = [f"{name} = {toml(value)}" for name, value in shown.items()]
        (folder / "broker.toml").write_text("\n".join(lines), encoding="utf-8")
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        """The program, before its arguments."""
        return [sys.executable, "-c", _SERVE]

    def arguments(self) -> list[str]:
        return ["serve", str(self.folder / "store"), "--config", str(self.folder / "broker.toml")]

    def start(self) -> None:
        """Start it, and wait until it listens."""
        with (self.folder / "log").open("ab") as log:
            command = [*self.command(), *self.arguments()]
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + START_S
        while not listens(self.port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                pytest.fail(f"the broker does not listen: {self.log()}")
            time.sleep(0.02)

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Start it; it ends cleanly."""
        try:
            self.start()
            yield self
            assert self.stop() == 0, self.log()
        finally:
            self.kill()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def log(self) -> str:
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")[-4_000:]

    def kill(self) -> None:
        """End it without a word."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(START_S)
            self._process = None

    def stop(self) -> int:
        """End it as an operator would; its exit status."""
        if self._process is None:
            return 0
        self._process.terminate()
        status = self._process.wait(START_S)
        self._process = None
        return status


class ServedProxy(ServedStore):
    """`duelog proxy` to brokers."""

    def __init__(self, folder: Path, *urls: str, options: Sequence[str] = ()) -> None:
        """options: of the command, more than those for ports and brokers."""
        super().__init__(folder)
        self._options = ["--host", "127.0.0.1", "--port", str(self.port), *options]
        for url in urls:
            self._options += ["--broker", url]

    def arguments(self) -> list[str]:
        return ["proxy", *self._options]


def listens(port: int) -> bool:
    """Return True if a connection is taken."""
    with socket.socket() as found:
        found.settimeout(1)
        return found.connect_ex(("127.0.0.1", port)) == 0


def toml(value: Any) -> str:
    """A value as TOML has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    return repr(value) if isinstance(value, (int, float)) else f'"{value}"'


ServeStore = Callable[..., ServedStore]


@pytest.fixture
def serve_store(tmp_path: Path) -> Iterator[ServeStore]:
    """Serve a store, prepared beforehand, with these settings; ended at the end of the test."""
    made: list[ServedStore] = []

    def make(prepare: Callable[[DelayedStore], object] | None = None, **settings: Any) -> ServedStore:
        broker = ServedStore(tmp_path / f"broker-{len(made)}", **settings)
        made.append(broker)
        if prepare is not None:
            with DelayedStore.open(broker.folder / "store") as store:
                prepare(store)
        broker.start()
        return broker

    yield make
    for broker in made:
        broker.kill()


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStore]:
    """A broker that asks for nothing, for all tests that leave it as it is; topic quota may have two pending messages.

    Its certificate is `cert.pem` of its folder. It ends cleanly.
    """
    folder = tmp_path_factory.mktemp("broker")
    certificate, key = write_pair(folder)
    broker = ServedStore(folder, webServicePort=free_port(), tlsCertificateFilePath=certificate, tlsKeyFilePath=key)
    with DelayedStore.open(broker.folder / "store") as store:
        store.set_policies(Policies(max_pending=2), topic="quota")
    with broker.running():
        yield broker


SECRET = b"0123456789abcdef0123456789abcdef"
SECURED = {
    "authenticationProviders": ["token"],
    "authorizationEnabled": True,
    "superUserRoles": ["root"],
    "tokenSecretKey": "data:;base64," + base64.b64encode(SECRET).decode(),
}


def token(role: str, **claims: Any) -> str:
    """A token of a role."""
    return jwt.encode({"sub": role, **claims}, SECRET, "HS256")


@pytest.fixture(scope="session")
def secured_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStore]:
    """A broker that asks for tokens, soon anew where they have expired, or for a password. It ends cleanly."""
    folder = tmp_path_factory.mktemp("secured")
    passwords = folder / "htpasswd"
    passwords.write_bytes(b"root:" + bcrypt.hashpw(b"secret", bcrypt.gensalt(4)) + b"\n")
    providers = {**SECURED, "authenticationProviders": ["token", "basic"]}
    broker = ServedStore(folder, **providers, basicAuthConf=passwords, authenticationRefreshCheckSeconds=0.25)
    with broker.running():
        yield broker


def environment(**more: str) -> dict[str, str]:
    """For a client's process: nothing of this process's paths."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, **more}


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """The environment in which a version of pulsar-client is imported, installed when it is first asked for."""
    found: dict[str, str | None] = {}
    folder = tmp_path_factory.mktemp("pulsar-client")

    def of(version: str) -> dict[str, str]:
        if version == "installed":
            pytest.importorskip("pulsar")
            return environment()
        if version not in found:
            target = folder / version
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
            done = subprocess.run(
                [*command, "--target", str(target), f"pulsar-client=={version}"],
                capture_output=True, text=True, timeout=180, check=False,
            )  # fmt: skip
            found[version] = None if done.returncode == 0 else done.stderr.strip()[-200:]
        reason = found[version]
        if reason is not None:
            pytest.skip(f"pulsar-client {version} cannot be installed: {reason}")
        return environment(PYTHONPATH=str(folder / version))

    return of


RunScenarios = Callable[..., None]


@pytest.fixture(scope="session")
def run_scenarios(library: Callable[[str], dict[str, str]]) -> RunScenarios:
    """Run scenarios of scenarios.py with a version of the client, some at a time, as they mostly wait.

    Each is a name, or a tuple with what only it is told more. One that an old version cannot do passes.
    """

    def run(version: str, url: str, topics: str, *scenarios: str | tuple[object, ...]) -> None:
        """topics: tells those of these scenarios from others."""
        env = library(version)

        def run_one(scenario: str | tuple[object, ...]) -> str:
            name, *more = [scenario] if isinstance(scenario, str) else scenario
            command = [sys.executable, str(HERE / "scenarios.py"), *map(str, (name, url, topics, *more))]
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SCENARIO_S, check=False)
            lacking = done.returncode == LACKING and version != "installed"  # the newest lacks nothing
            said = f"{name}: {done.returncode}\n{done.stdout[-3_000:]}\n{done.stderr[-3_000:]}"
            return "" if lacking or done.returncode == 0 else said

        with ThreadPoolExecutor(4) as pool:
            failures = [each for each in pool.map(run_one, scenarios) if each]
        assert not failures, "\n\n".join(failures)

    return run


@pytest.fixture(scope="session")
def flex(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pulsar-flex in it."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("there is no Node on this machine")
    folder = tmp_path_factory.mktemp("flex")
    (folder / "package.json").write_text('{"private": true}')
    command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "pulsar-flex@1.1.1"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180, check=False)
    if done.returncode != 0:
        pytest.skip(f"pulsar-flex cannot be installed: {done.stderr.strip()[-200:]}")
    shutil.copy(HERE / "flex.js", folder)
    return folder
