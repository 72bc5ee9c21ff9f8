"""Scripts as users write them, run without any setup."""

import os
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from bench.chaos.planes import MARK

ROOT = Path(__file__).parents[2]
EXAMPLE = """\
import pointsman as pm

@pm.deployment                       # classes and functions; options can be given here too
class Model:
    def __init__(self, val): self.val = val
    def forward(self, input): return self.val * input

@pm.deployment
def ensemble(a, b, c): return a + b + c

async def request_to_data_int(request): return int(await request.body())      # a Starlette-like request

with pm.InputNode(preprocessor=request_to_data_int) as dag_input:
    m1 = Model.bind(1)
    m2 = Model.bind(2)
    m1_output = m1.forward.bind(dag_input[0])
    m2_output = m2.forward.bind(dag_input[1])
    dag = ensemble.bind(m1_output, m2_output, dag_input[2])

assert dag.execute(1, 2, 3) == 8                  # in this process: 1*1 + 2*2 + 3
app = pm.build(dag)
app.m1.set_options(num_replicas=3)                # names are the variable names; name= overrides
app.ingress.set_options(num_replicas=2)
handle = app.deploy()                             # local runtime by default; runtime="ray" later
assert handle.remote(1, 2, 3).result() == 8
open("deployment.yaml", "w").write(app.to_yaml()) # then: pointsman deploy deployment.yaml
"""


def run(script: Path, folder: Path, *args: str) -> str:
    """The output of a script, which must exit by itself and leave no process behind."""
    mark = uuid4().hex
    done = subprocess.run(
        [sys.executable, str(script), *args],
        cwd=folder,
        env={**os.environ, MARK: mark},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert marked_processes(mark) == {}
    return done.stdout


def marked_processes(mark: str) -> dict[int, str]:
    """Command lines of the processes with this mark in their environment, by pid."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


def test_a_script_that_deploys_on_import_runs_once(tmp_path: Path) -> None:
    """Nothing guards its deploy(): replicas load the same file and must not deploy again."""
    (tmp_path / "pipeline.py").write_text(EXAMPLE, encoding="utf-8")
    run(tmp_path / "pipeline.py", tmp_path)
    text = (tmp_path / "deployment.yaml").read_text(encoding="utf-8")
    assert "replicas: 3" in text
    checked = subprocess.run(
        [sys.executable, "-m", "pointsman.cli.main", "check", "config", "deployment.yaml"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_diamond_example(tmp_path: Path) -> None:
    output = run(ROOT / "examples" / "diamond.py", tmp_path)
    assert "in this process: 8" in output
    assert "on replicas: 8" in output
    assert "over HTTP: 8" in output


def test_a_replica_that_cannot_start_fails_the_script(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(
        "import pointsman as pm\n\n\n@pm.deployment\nclass Model:\n    def __init__(self):\n"
        "        raise RuntimeError('no weights')\n\n    def forward(self, x):\n        return x\n\n\n"
        "with pm.InputNode() as given:\n    m1 = Model.bind()\n    dag = m1.forward.bind(given)\n\n"
        "if __name__ == '__main__':\n    pm.build(dag).deploy()\n",
        encoding="utf-8",
    )
    with pytest.raises(AssertionError, match="no weights"):
        run(script, tmp_path)
