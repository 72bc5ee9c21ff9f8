# mypy: ignore-errors
"""The published program of Serve Pipeline; only its imports are others."""

import ray

from pointsman.integrations.ray_serve import ServeInputNode, pipeline


@ray.remote
class Model:
    def __init__(self, val):
        self.val = val

    def forward(self, input):
        return self.val * input


@ray.remote
def ensemble(a, b, c):
    return a + b + c


async def request_to_data_int(request):
    return await request.json()


# Building DAG
with ServeInputNode(preprocessor=request_to_data_int) as dag_input:
    m1 = Model.bind(1)
    m2 = Model.bind(2)
    m1_output = m1.forward.bind(dag_input[0])
    m2_output = m2.forward.bind(dag_input[1])
    ray_dag = ensemble.bind(m1_output, m2_output, dag_input[2])

# Run it
assert ray.get(ray_dag.execute(1, 2, 3)) == 8

# Build and configure
app = pipeline.build(ray_dag)
app.m1.set_options(num_replicas=3)
app.ingress.set_options(num_replicas=10)

# Deploy it
app_handle = app.deploy()
assert ray.get(app_handle.remote(1, 2, 3)) == 8

with open("deployment.yaml", "w") as file:
    file.write(app.to_yaml())
