"""A standalone cluster on loopback, a master and two workers of one core each, and duelog's jobs submitted to it.

    python -m tests.spark.cluster

Builds the wheel, sends it along as a .zip (Spark takes no .whl), and runs compact, audit, export and a query of the
data source over both workers, of a store and of its copy, whose tasks touch no directory of the store. Takes some
minutes, so it is run by hand, before a release; prints what each job said.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyspark

from duelog import DelayedStore, StoreConfig
from duelog.tools.spark.session import find_java, wrap_java
from tests.tools.closed_days import build_half_acknowledged

ROOT = Path(__file__).resolve().parents[2]
HOME = Path(pyspark.__file__).parent
WAIT_S = 60.0

QUERY = """
import sys
from duelog.tools.spark.session import make_session
import duelog

spark = make_session()
frame = spark.read.format("duelog").schema("topic string, due_ms bigint").option("slice_entries", 200).load(sys.argv[1])
print("rows", frame.count(), "tasks over", spark.sparkContext.defaultParallelism, "cores, duelog of the driver:",
      duelog.__file__)


def where(batches):
    import os
    import pyarrow as pa
    import duelog
    for batch in batches:
        yield pa.RecordBatch.from_pydict({"file": [duelog.__file__], "executor": [os.getcwd().rpartition("/")[2]]})


for row in sorted(frame.mapInArrow(where, "file string, executor string").distinct().collect()):
    print("executor", row.executor, "has duelog of", row.file)
spark.stop()
"""


def main() -> int:
    """Run it; 0 if every job did."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="duelog-cluster-")))
        environment = {
            **os.environ,
            "JAVA_HOME": str(wrap_java(find_java(), place / "java")),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "SPARK_WORKER_DIR": str(place / "work"),
        }
        environment.pop("PYTHONPATH", None)
        archive = zipped_wheel(place)
        url = stack.enter_context(cluster(place, environment))
        store = build_half_acknowledged(place / "store", 2_000)
        (place / "query.py").write_text(QUERY)
        submit = [str(HOME / "bin" / "spark-submit"), "--master", url, "--py-files", str(archive)]
        copy = (place / "bucket").as_uri()
        with DelayedStore.open(store.path, StoreConfig(replica=copy)) as opened:
            opened.save_manifest()
        jobs = [
            job
            for number, given in enumerate((copy, str(store.path)))
            for job in (
                [str(place / "query.py"), given],
                *([str(ROOT / "tools" / "spark" / "submit.py"), name, given, *more, "--spark"]
                  for name, *more in (("audit",), ("compact",), ("export", str(place / f"archive-{number}")))),
            )
        ]  # fmt: skip
        return max(run([*submit, *job], place, environment) for job in jobs)


def run(command: list[str], place: Path, environment: dict[str, str]) -> int:
    """Run a job and show what it printed; its exit status."""
    started = time.monotonic()
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
    print(f"-- {' '.join(command[5:])}: exit status {done.returncode}, {time.monotonic() - started:.1f} s")
    print(done.stdout)
    if done.returncode:
        print(done.stderr[-4_000:])
    return done.returncode


def zipped_wheel(place: Path) -> Path:
    """The wheel of the checkout, under the name that Spark takes."""
    source = place / "source"
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(place), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = place.glob("*.whl")
    return wheel.rename(place / "duelog.zip")


@contextmanager
def cluster(place: Path, environment: dict[str, str]) -> Iterator[str]:
    """A master and two workers, until the block ends; gives the master's address."""
    log = place / "cluster.log"
    processes: list[subprocess.Popen[bytes]] = []

    def begin(kind: str, *arguments: str) -> None:
        command = [
            str(HOME / "bin" / "spark-class"),
            f"org.apache.spark.deploy.{kind}",
            "--webui-port",
            "0",
            *arguments,
        ]
        with log.open("ab") as output:
            processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))

    def said(pattern: str, times: int = 1) -> str:
        deadline = time.monotonic() + WAIT_S
        while len(found := re.findall(pattern, log.read_text())) < times:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the cluster did not say {pattern!r}")
            time.sleep(0.2)
        return str(found[0])

    try:
        begin("master.Master", "--host", "127.0.0.1", "--port", "0")
        url = said(r"Starting Spark master at (spark://\S+)")
        for _ in range(2):
            begin("worker.Worker", "--cores", "1", "--memory", "1g", url)
        said("Registering worker", 2)
        yield url
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)


if __name__ == "__main__":
    sys.exit(main())
