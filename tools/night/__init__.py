"""The night: incidents are planted in a live system, and found by what an operator has.

    python -m tools.night --kinds poison-message,held-key --seeds 0-9

Each run has one incident, on a system of its own: a server, two workers, two producers with 100 triggers a second in
all, guarded calls, the exporter of metrics, and a Prometheus with the configuration of `docs/monitoring.md`. The seed
chooses key, topic, moment and number. Keys have spaces, quotes, escapes and leading dashes.

A run asserts that

- `idemgate status --json` names the subject and the cause, and that the alert of the finding fires for its topic or
  scope, both within 30 s after the threshold of the finding;
- nothing is found besides, and no other alert fires, except what follows from the incident;
- the command that the finding prints runs as it is printed, by bash. Where the queue can mend it, the finding then goes
  away. Else the run does what the page asks a person to do, and the finding goes away;
- a cancelled message, a key that was completed by hand, and a duplicate that ran twice raise no alert. `idemgate key
  show` tells what happened, when, and by whom;
- a quiet time, a rolling deploy, and one `kill -9` of a worker show no finding and no alert.

All thresholds are those of the catalogue, in real time, with one exception: the pause is written by a gate whose clock
is behind, because its threshold is five minutes. The producer with the fast clock gets another `time.time`, not another
clock of its machine. The tests run two kinds with a Prometheus whose intervals are a tenth. That an alert ends with its
finding is not waited for here: promtool tries it (`tests/audit/test_alerts.py`).
"""
