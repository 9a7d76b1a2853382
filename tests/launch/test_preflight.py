"""The preflight on a real session: its findings and its time limit."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import uuid

import pytest
import torch

import sparkhvd
from sparkhvd import Store, TorchEstimator
from sparkhvd.cli.main import _last_line, main
from sparkhvd.driver.preflight.preflight import RequestedTasks
from sparkhvd.driver.preflight.report import Check, Verdict
from sparkhvd.driver.spark.resources import TaskResources
from sparkhvd.errors import ConfigError
from tests.waiting import wait_for

pytestmark = pytest.mark.spark


def estimator_of(
    store: Store | None, model: torch.nn.Module, backend: str | sparkhvd.SparkBackend = "auto"
) -> TorchEstimator:
    return TorchEstimator(
        num_proc=2 if isinstance(backend, str) else None,
        backend=backend,
        store=store,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["x", "pixels"],
        label_cols=["y"],
        validation=0.2,
    )


class TwoInputs(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, 1)

    def forward(self, x, pixels):
        return self.layer(torch.cat([x[:, None], pixels], dim=1))


@pytest.fixture
def rows(spark):
    return spark.range(50).selectExpr("id / 50.0D AS x", "array(1.0D, id * 2.0D, 3.0D) AS pixels", "id * 3.0D AS y")


def test_the_preflight_reports_a_good_cluster_as_ready(spark, rows, tmp_path):
    printed = io.StringIO()
    report = sparkhvd.preflight(
        spark, estimator=estimator_of(Store.create(str(tmp_path)), TwoInputs(4)), df=rows, timeout=200.0, stdout=printed
    )
    assert report.ok, printed.getvalue()
    assert printed.getvalue() == f"{report}\n"
    found = {check.name: check for check in report.checks}
    names = ("slots", "network", "elastic", "devices", "versions", "frameworks", "shared memory", "store", "model")
    assert set(found) == set(names)
    assert found["slots"].says == "2 ranks (2 requested; master local[4])"
    assert "x [5], pixels [5, 3], y [5] gave [5, 1]" in found["model"].says
    assert [task.task_index for task in report.tasks] == [0, 1]
    assert report.tasks[0].versions == report.driver
    assert report.tasks[0].versions["torch"] == torch.__version__.partition("+")[0]


def test_the_preflight_reports_all_problems_at_once(spark, rows):
    store = Store.create(f"memory://{uuid.uuid4().hex}")  # every process has a memory of its own
    printed = io.StringIO()
    report = sparkhvd.preflight(
        spark, 9, store=store, estimator=estimator_of(None, TwoInputs(7)), df=rows, timeout=200.0, stdout=printed
    )
    failed = {check.name: check.says for check in report.checks if check.verdict is Verdict.FAIL}
    assert set(failed) == {"slots", "store", "model"}
    assert "num_proc=9 is more than the 4 slots of the cluster" in failed["slots"]
    assert "is not shared: the executor on host" in failed["store"]
    assert "mat1 and mat2 shapes cannot be multiplied" in failed["model"]
    assert len(report.tasks) == 4, "the preflight examines the existing slots"
    assert "3 problems" in printed.getvalue()


def test_a_slow_query_is_reported_after_the_timeout_and_cancelled(spark):
    class Slow:
        def getStore(self):  # noqa: N802
            return None

        def requested_tasks(self):
            return RequestedTasks(1, TaskResources())

        def try_rows(self, dataset, count):
            return str(dataset.head(count))

    endless = spark.range(0, 10**12, 1, 1).selectExpr("sum(sqrt(id)) AS x")
    report = sparkhvd.preflight(spark, estimator=Slow(), df=endless, timeout=1.0, stdout=io.StringIO())
    (check,) = [check for check in report.checks if check.name == "model"]
    assert check.verdict is Verdict.FAIL
    assert check.says.startswith("5 rows of df did not pass through the model within 1 s. If df is costly to compute")
    wait_for(lambda: not spark.sparkContext.statusTracker().getActiveJobsIds())  # the query was cancelled


def test_the_exit_code_of_the_doctor_is_its_verdict(spark, tmp_path, capsys):
    assert main(["doctor", "-np", "2", "--store", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "sparkhvd preflight: ready" in printed
    assert f"store          file://{tmp_path}: a local folder, and all tasks run on this machine" in printed
    assert main(["doctor", "-np", "9"]) == 1
    assert main(["doctor", "--conf", "nothing"]) == 1
    assert "--conf must be NAME=VALUE, like spark.executor.cores=4, got 'nothing'." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["-np", "0"], "num_proc must be an integer of at least 1, got 0."),
        (["--timeout", "-1"], "timeout must be a positive number of seconds, got -1.0."),
        (["--gpus-per-task", "1.5"], "gpus_per_task must be a positive integer or a fraction between 0 and 1 .Spark"),
        (["--cpus-per-task", "0"], "cpus_per_task must be an integer of at least 1, got 0."),
        (["more"], "unexpected argument more. See sparkhvd --help."),
        (["--nothing"], "unknown flag --nothing. See sparkhvd --help."),
        (["--mastr", "yarn"], r"unknown flag --mastr. Did you mean --master\? See sparkhvd --help."),
    ],
)
def test_the_doctor_refuses_wrong_flags_in_one_line(flags, words, capsys):
    try:
        code: object = main(["doctor", *flags])
    except SystemExit as ended:
        code = ended.code
    assert code != 0
    printed = capsys.readouterr()
    assert not printed.out
    assert re.fullmatch(rf"sparkhvd: .*{words}.*\n", printed.err), printed.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--master", "nonsense"],
            "no Spark session on nonsense: .* Spark's last output: .*Master must either be yarn or start with",
        ),
        pytest.param(
            ["--master", "spark://127.0.0.1:1", "--timeout", "10"],
            "on spark://127.0.0.1:1: it was not created within --timeout 10 s",
            marks=pytest.mark.soak,
        ),
        (
            ["--master", "spark://no.host.invalid:7077,other.invalid:7077"],
            "cannot resolve the host 'no.host.invalid' .* and 'other.invalid' .*Check the name",
        ),
        pytest.param(
            ["--remote", "sc://no.host.invalid"], "cannot resolve the host 'no.host.invalid'", marks=pytest.mark.soak
        ),
        (
            ["--remote", "sc://127.0.0.1:1", "--timeout", "3"],
            "on sc://127.0.0.1:1: it was not created within --timeout 3 s",
        ),
    ],
)
def test_the_doctor_reports_in_one_line_why_it_has_no_session(flags, words):
    done = subprocess.run(
        [sys.executable, "-m", "sparkhvd.cli.main", "doctor", *flags],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode != 0
    assert not done.stdout
    waiting = r"sparkhvd: waiting at most [\d.]+ s for a Spark session on \S+\n"
    assert re.fullmatch(rf"({waiting})?sparkhvd: .*{words}.*\n", done.stderr), done.stderr


def test_sparks_usual_startup_output_is_not_quoted_as_the_reason():
    log = io.BytesIO(
        b"Using Spark's default log4j profile: org/apache/spark/log4j2-defaults.properties\n"
        b"26/11/22 12:34:03 WARN StandaloneAppClient: Failed to connect to master host:7077\n"
        b"\tat org.apache.spark.rpc.RpcEnv\n"
        b"26/11/22 12:34:04 WARN NativeCodeLoader: Unable to load native-hadoop library for your platform\n"
    )
    assert _last_line(log).endswith("WARN StandaloneAppClient: Failed to connect to master host:7077")
    assert not _last_line(io.BytesIO(b"12:34:04 WARN NativeCodeLoader: Unable to load native-hadoop library\n"))


def test_a_command_line_without_a_command_shows_the_help(capsys):
    assert main([]) == 2
    shown = capsys.readouterr().err
    assert "doctor" in shown
    assert "check a cluster for problems that would prevent or slow down a job" in " ".join(shown.split())


def test_a_misspelled_command_is_answered_with_the_right_one(capsys):
    with pytest.raises(SystemExit):
        main(["doctr"])
    assert "unknown value 'doctr'. Did you mean 'doctor'? See sparkhvd --help." in capsys.readouterr().err


def test_the_doctor_checks_the_named_network_interfaces(spark, capsys):
    assert main(["doctor", "-np", "2", "--network-interfaces", "eth77,lo"]) == 0
    assert main(["doctor", "-np", "1", "--network-interfaces", "eth77"]) == 1
    assert "None of the network interfaces ['eth77'] has an address on host " in capsys.readouterr().out


def test_the_preflight_checks_the_network_interfaces_of_an_estimator(spark):
    estimator = estimator_of(None, TwoInputs(2), sparkhvd.SparkBackend(2, nics=["eth77"]))
    (problem,) = sparkhvd.preflight(spark, estimator=estimator, stdout=io.StringIO()).problems
    assert "None of the network interfaces ['eth77'] has an address on host " in problem
    assert sparkhvd.preflight(spark, estimator=estimator, nics=["lo"], stdout=io.StringIO()).ok


def test_the_preflight_checks_encryption_on_request(spark):
    quiet = sparkhvd.preflight(spark, stdout=io.StringIO())
    assert "encryption" not in [check.name for check in quiet.checks]
    estimator = estimator_of(None, TwoInputs(2), sparkhvd.SparkBackend(2, env={"SPARKHVD_ENCRYPT": "1"}))
    (check,) = [
        check
        for check in sparkhvd.preflight(spark, estimator=estimator, stdout=io.StringIO()).checks
        if check.name == "encryption"
    ]
    assert check == Check("encryption", Verdict.OK, "all hosts can encrypt the job's connections")


def test_invalid_arguments_of_the_preflight_are_refused(spark):
    with pytest.raises(ConfigError, match=r"nics must be a list of names, got the string 'lo'\. Pass \['lo'\]"):
        sparkhvd.preflight(spark, nics="lo")
    with pytest.raises(ConfigError, match="cpus_per_task must be an integer of at least 1, got 0"):
        sparkhvd.preflight(spark, cpus_per_task=0)
