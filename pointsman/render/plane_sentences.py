"""Sentences about the plane itself: its scaling, its policies, and what its process or machine lacks."""

from collections.abc import Mapping

from pointsman.render.grammar import (
    Phrase,
    Template,
    either,
    keys_changed,
    remedied,
    removes_all,
    room_after_moving,
    setting_changed,
    task_failed,
    unplaced,
    user_config_changed,
    words,
)
from pointsman.render.text import quantity

_ORDER = "{replicas} ordered by {by} until "
_OVERRIDE = either("until", None, _ORDER + "it is released", _ORDER + "{until}")

OF_PLANE: Mapping[str, Template | Phrase] = {
    # Why a target changed, or did not change
    "policy-wants": "{replicas} wanted",
    "request-waits": "a request waits, and there is no instance",
    "gave-way": "it made room for another deployment, and has no requests",
    "held-by-trouble": "not more while {trouble}",
    "override": _OVERRIDE,
    "override-ended": lambda facts: f"ended: {_OVERRIDE(facts)}",
    "override-released": lambda facts: f"released: {_OVERRIDE(facts)}",
    "unloaded-for": "makes room for {deployment}, which has requests and no instance; it was idle longest",
    "room-from-idle": "{deployment}, which is idle, makes room for it",
    "room-from-spare": "{instance} of {deployment}, which has spare replicas, makes room for it",
    "room-from-turn": "{instance} of {deployment}, which has had its turn, makes room for it",
    "waits-for-room": "started as soon as there is room",
    "fits-no-worker": "no worker could take it, even if it were empty: {why}",
    "start-retried": "it is restarted with backoff",
    "start-given-up": "it is not started again until it is applied again",
    "all-run-again": "all instances run again",
    "scaling-began": "scaling begins with the {running} that run",
    "policy-recovered": "{policy} answers again after it {problem}",
    "scaling-max": "at most {max} (max)",
    "scaling-min": "at least {min} (min)",
    "scaling-up-delay": "{goal} after {delay_s:g} s (upDelay)",
    "scaling-down-delay": "fewer after {delay_s:g} s (downDelay)",
    "scaling-cooldown": "no change for {cooldown_s:g} s after the last one (cooldown)",
    "scaling-up-factor": "{step} of {change} more at once (upFactor {factor:g})",
    "scaling-down-factor": "{step} of {change} fewer at once (downFactor {factor:g})",
    "scaling-max-step": "{step} at a time (maxStep)",
    "scaling-idle-timeout": "the last replica goes after {idle_timeout_s:g} s without a request (idleTimeout)",
    # What a plan changes
    "application-added": "new: the application takes requests at /{application}",
    "application-removed": "the application was removed, and /{application} with it",
    "calls-changed": "the calls of the application have changed",
    "deployment-added": either(
        "model",
        None,
        "new: it takes calls of its application; {decided_by} decides where they go",
        'new: it takes requests for "{model}"; {decided_by} decides where they go',
    ),
    "deployment-removed-with-model": 'it was removed from the manifest, and "{model}" with it',
    "node-removed": "it is no longer a node of its application",
    "user-config-changed": user_config_changed,
    "candidates-changed": lambda facts: f"candidates: {', '.join(facts['candidates']) or 'none'}",
    "setting-changed": setting_changed,
    "settings-changed": lambda facts: ", ".join(map(setting_changed, facts["changes"])),
    "keys-changed": keys_changed,
    "removes-authentication": "it removes authentication: the gateway has keys now, and would serve requests without "
    "any",
    "removes-admin-key": "it removes the admin key: the admin API would no longer be reachable over the network",
    "removes-all": removes_all,
    "takes-away": lambda facts: (
        f"it takes away {facts['instances']} of {quantity(facts['running'], 'instance')} that run"
    ),
    # Problems of a policy, or of instances
    "policy-too-slow": either(
        "taken_s",
        None,
        "took more than {limit_s:g} s (timeLimit)",
        "took {taken_s:.3g} s; it may take {limit_s:g} s (timeLimit)",
    ),
    "policy-raised": "{text}",
    "policy-slow": "took {taken_ms:g} ms; it may take {limit_ms:g} ms (timeLimit)",
    "policy-blocked": "was interrupted after {limit_ms:g} ms",
    "policy-suspended": "is suspended for another {left_s:.3g} s, as it {cause}",
    "policy-unguarded": 'deployment "{deployment}": calls of {policy} cannot be timed; write it as an ordinary class',
    "answers-useless": 'deployment "{deployment}": answers of its scheduling code could not be used ({count} times, '
    "the last: {last}); a stand-in decided; correct the code, and apply it again",
    "policy-misbehaves": either(
        "left_s",
        None,
        'deployment "{deployment}": {policy} {cause} ({count} times, last {last_s:g} s ago); it is in use',
        'deployment "{deployment}": {policy} {cause} ({count} times, last {last_s:g} s ago); a stand-in decides, '
        "and it is tried again in {left_s:g} s",
    ),
    "candidate-suspended": 'deployment "{deployment}": its candidate {candidate} {cause}; requests are not affected, '
    "and it is tried again in {left_s:g} s",
    "condition-met": "{metric} changed by {change:+.1%}: {condition}",
    "condition-not-met": "it changed by {change:+.1%}, which is not {condition}",
    "too-few-to-compare": "{requests} requests of a share had {metric}; at least {needed} are needed",
    "candidate-much-worse": "{metric} changed by {change:+.1%} in {requests} requests",
    "candidate-errs": "{errors} of {requests} requests failed in its share, and {in_force:.1%} of the others",
    "candidate-without-answer": "it had no answer {failures} times: it {problem}",
    "promotion-stopped": "{by} stopped it",
    "promotion-failed": "it could not be carried out",
    "manifest-changed": "the manifest was changed meanwhile",
    "policy-state-too-large": "wrote {size_kib} KiB into view.state, which may have {limit_kib} KiB; what it wrote is "
    "dropped",
    "policy-answer-invalid": "returned {found}; it must be a whole number of replicas from 0 to {max:,}, or a Wish "
    "for one",
    "instance-not-running": "{instance} does not run: {why}",
    "instances-unplaced": unplaced,
    "room-after-moving": room_after_moving,
    # What this process or machine lacks
    "requests-not-sent": remedied("{requests} requests could not be sent to instances: {error}"),
    "gateway-not-started": words("{gateway} cannot be started: {why}"),
    "gateway-lost": words("{gateway} is not connected to the plane; it was started again {restarts} times"),
    "usage-refused": words("{instances} refused stream_options.include_usage; the tokens of streams are estimated"),
    "probes-not-made": remedied("{instances} instances could not be probed, and stay as they are: {error}"),
    "records-not-stored": "records cannot be written to {file}: {error}; {lost} were dropped so far. "
    "Requests are still served; free space on its disk, or make it writable",
    "prefix-index-full": words(
        'the prefix index of "{deployment}" is full ({used_bytes}): {dropped} blocks that instances may have cached '
        "were dropped; raise gateway.maxPrefixIndexBytes"
    ),
    "many-block-sizes": 'instances of "{deployment}" report many KV block sizes; the rarest are matched by the most '
    "common one",
    "no-folder": "there is no folder {folder} on this machine, so instances such as {instance} run in {used}: relative "
    "paths resolve there; apply the manifest from a folder that exists",
    "machine-not-seen": remedied("the resources of this machine cannot be detected, so the last known ones stay"),
    "machine-not-detected": "the resources of this machine cannot be detected, so instances get no places: {error}",
    "gpus-not-detected": lambda facts: (
        f"{facts['gpus']} NVIDIA GPU{'s are' if facts['gpus'] > 1 else ' is'} plugged in and cannot be asked; install "
        "the driver, and pip install nvidia-ml-py"
    ),
    "connections-limited": "gateway.limits.maxConnections is {max_connections}, but {open_files} open files allow only "
    "{allowed}; raise the limit (ulimit -n) or lower the setting",
    "gateway-not-as-configured": "{gateway}: {error}",
    "task-failed": task_failed,
    "store-behind": "{file} cannot be written for {since_s:.0f} s now ({error}); {changes} changes wait to be stored. "
    "Requests, repair and scaling continue; changes by operators are refused",
    "supervisor-gone": "the supervisor of the engine processes is gone; another is being started",
    "no-supervisor": "no supervisor can be started: {error}",
    "supervisor-confused": "the plane and its supervisor did not understand each other: {why}",
    # What differs from the documents
    "endpoints-file-unreadable": either(
        "kept", 0, "{file}: {error}", "{file}: {error}; the endpoints that it last listed are kept"
    ),
    "endpoints-file-invalid": "{error}; the endpoints that it last listed are kept",
    "application-broken": 'application "{application}" is not in force, because it no longer loads: {error}',
    "code-edited": "{instance} runs code that was edited since it was deployed; to put the edited code in force for "
    "all, deploy or apply it again",
    "user-config-not-sent": "{instance} did not receive its user config: {error}",
    "user-config-refused": "{instance} refused its user config: {error}",
    "metrics-not-read": "the metrics of {instance} could not be read {failures} times in a row: {why}",
    "metric-not-read": '"{deployment}": metric "{metric}" cannot be read from {url}: {error}',
    "metric-useless": either(
        "found",
        None,
        '"{deployment}": metric "{metric}": its query finds nothing at {url}',
        '"{deployment}": metric "{metric}": its query gives {found} at {url}',
    ),
    "scaling-policy-fails": 'the scaling policy {policy} of "{deployment}" {why}; the target stays {target}',
    "policy-call-stuck": 'a call of {policy}, which decides about "{deployment}" no more, does not return; it takes a '
    "core or a thread until the plane is started again",
    "router-settings-unusable": "request_router_kwargs of {deployment} cannot be used: {error}; {policy} decides",
    # Ray
    "worker-silent": either(
        "left_s",
        None,
        "worker {worker} has not answered for {silent_s:.0f} s: {error}",
        "worker {worker} has not answered for {silent_s:.0f} s: {error}; what it runs ends within {left_s:.0f} s",
    ),
    "on-worker": "on {worker}: {why}",
    "lease-ended": "its lease has ended, and everything with it",
    "keeper-silent": either(
        "in_doubt",
        False,
        "the keeper of the state does not answer: {error}",
        "the keeper of the state does not answer: {error}; another plane may rule the cluster, so this one starts and "
        "stops nothing until it does",
    ),
    "plane-replaced": "{error}; this one takes no further action: stop it",
    "plane-outdated": "{error}",
    "state-not-stored": "the state is not stored: {error}; changes wait",
    "no-ray-storage": "the state is in the memory of the cluster, and lost with the node that holds it; name a folder "
    "that all nodes reach with --storage",
    "ray-nodes-unknown": "Ray does not report its nodes: {error}",
    "ray-nodes-alike": "two Ray nodes are called {name}; start one with --node-name",
    "ray-gpus-unknown": "Ray node {worker} has {gpus} GPUs of unknown memory, which are not used: install nvidia-ml-py "
    "there, or start it with --labels {label}=24Gi",
}
