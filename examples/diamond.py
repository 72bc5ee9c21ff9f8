"""A diamond: two models see the request, and an ensemble of what they say is the answer. Run it: python diamond.py"""

from urllib.request import urlopen

import pointsman as pm


@pm.deployment  # classes and functions; options can be given here too
class Model:
    def __init__(self, val: int) -> None:
        self.val = val

    def forward(self, input: int) -> int:  # noqa: A002
        return self.val * input


@pm.deployment
def ensemble(a: int, b: int, c: int) -> int:
    return a + b + c


with pm.InputNode() as dag_input:
    m1 = Model.bind(1)
    m2 = Model.bind(2)
    m1_output = m1.forward.bind(dag_input[0])
    m2_output = m2.forward.bind(dag_input[1])
    dag = ensemble.bind(m1_output, m2_output, dag_input[2])

if __name__ == "__main__":
    print("in this process:", dag.execute(1, 2, 3))
    app = pm.build(dag)
    print(app.draw())
    app.m1.set_options(num_replicas=2)
    handle = app.deploy()
    print("on replicas:", handle.remote(1, 2, 3).result())
    print("over HTTP:", urlopen(handle.url, b"[1, 2, 3]").read().decode())
