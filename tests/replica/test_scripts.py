"""A script without `if __name__ == "__main__"`: replicas load only what they need."""

from pathlib import Path

from tests.replica.replicas import replica

DIAMOND = """
import pointsman as pm

@pm.deployment
class Model:
    def __init__(self, val): self.val = val
    def forward(self, input): return self.val * input

@pm.deployment
def ensemble(a, b, c): return a + b + c

async def request_to_data_int(request): return int(await request.body())

with pm.InputNode(preprocessor=request_to_data_int) as dag_input:
    m1 = Model.bind(1)
    m2 = Model.bind(2)
    m1_output = m1.forward.bind(dag_input[0])
    m2_output = m2.forward.bind(dag_input[1])
    dag = ensemble.bind(m1_output, m2_output, dag_input[2])

assert dag.execute(1, 2, 3) == 8
app = pm.build(dag)
handle = app.deploy()
assert handle.remote(1, 2, 3).result() == 8
raise RuntimeError("a replica has run what is not for it")
"""


def test_a_script_without_a_main_guard_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "diamond.py").write_text(DIAMOND)
    with replica(tmp_path, code="diamond.py:Model", args=[2]) as running:
        assert running.value("forward", 21) == 42
    with replica(tmp_path, code="diamond.py:ensemble", kind="function") as running:
        assert running.value("__call__", 1, 2, 3) == 6
    with replica(tmp_path, kind="ingress", preprocessor="diamond.py:request_to_data_int") as running:
        assert running.input(b"7", [[]]).status == 200
