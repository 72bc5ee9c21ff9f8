# mypy: ignore-errors
"""The published program with our decorators, on the cluster whose address it is given."""

import sys

import pointsman as pm


@pm.deployment
class Model:
    def __init__(self, val):
        self.val = val

    def forward(self, input):  # noqa: A002 (the published program calls it so)
        return self.val * input


@pm.deployment
def ensemble(a, b, c):
    return a + b + c


async def request_to_data_int(request):
    return await request.json()


# Building DAG
with pm.InputNode(preprocessor=request_to_data_int) as dag_input:
    m1 = Model.bind(1)
    m2 = Model.bind(2)
    m1_output = m1.forward.bind(dag_input[0])
    m2_output = m2.forward.bind(dag_input[1])
    dag = ensemble.bind(m1_output, m2_output, dag_input[2])

if __name__ == "__main__":
    # Run it
    assert dag.execute(1, 2, 3) == 8

    # Build and configure
    app = pm.build(dag)
    app.m1.set_options(num_replicas=2)
    app.ingress.set_options(num_replicas=2)

    # Deploy it
    app_handle = app.deploy("ray", address=sys.argv[1])
    assert app_handle.remote(1, 2, 3).result() == 8
    print("url", app_handle.url)
